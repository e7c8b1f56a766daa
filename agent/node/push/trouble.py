"""Which rows the root should have at once."""

from collections.abc import Sequence

from mp_agent.records.rows import NodeStep

_NONFINITE_COLUMNS = ("nan_elements", "inf_elements")


def is_troubled(step: NodeStep, gradient_columns: Sequence[str]) -> bool:
    """Return whether a rank of the node had a loss or gradients that are not finite."""
    if step.nonfinite_loss_ranks:
        return True
    places = [
        gradient_columns.index(name) for name in _NONFINITE_COLUMNS if name in gradient_columns
    ]
    return any(any(row.columns[place]) for row in step.rows for place in places)
