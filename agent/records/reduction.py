"""What the ranks themselves have reduced, as columns of rank 0's records.

A record has the newest step that was reduced when its own began. The node agent of rank 0 so knows
the run's numbers also where other nodes cannot reach it. Other agents leave these columns alone.
"""

from collections.abc import Mapping

from mp_agent.records.columns import GRADIENTS, STEP_COLUMNS
from mp_agent.records.columns.column import Algebra
from mp_agent.records.global_statistics import GlobalStatistics

_SEQUENCE, _STEP = "reduced_sequence", "reduced_step"
_WORLD_SIZE, _PRESENT_RANKS = "reduced_world_size", "reduced_present_ranks"
_COMPLETE = "reduced_gradients_complete"

_OF_STEP = {
    f"reduced_{column.name}": column.name
    for column in STEP_COLUMNS
    if column.algebra is not Algebra.OWN
}
_OF_GRADIENTS = {f"reduced_gradients_{name}": name for name in GRADIENTS.names}

REDUCED_COLUMNS = (
    *(_SEQUENCE, _STEP, _WORLD_SIZE, _PRESENT_RANKS, _COMPLETE),
    *_OF_STEP,
    *_OF_GRADIENTS,
)
"""Their names. Rings have them where the ranks reduce."""


def reduced_values(found: GlobalStatistics) -> dict[str, float]:
    """Return statistics as values of these columns, by name; what is absent is left out."""
    return {
        _SEQUENCE: float(found.sequence),
        _STEP: float(found.step),
        _WORLD_SIZE: float(found.world_size),
        _PRESENT_RANKS: float(found.present_ranks),
        _COMPLETE: float(found.complete),
        **_renamed({own: name for name, own in _OF_STEP.items()}, found.columns),
        **_renamed({own: name for name, own in _OF_GRADIENTS.items()}, found.gradients),
    }


def reduced_statistics(values: Mapping[str, float]) -> GlobalStatistics | None:
    """Return the statistics in the observed columns of a record, by name; None without any."""
    if _SEQUENCE not in values:
        return None
    return GlobalStatistics(
        sequence=int(values[_SEQUENCE]),
        step=int(values[_STEP]),
        world_size=int(values[_WORLD_SIZE]),
        present_ranks=int(values[_PRESENT_RANKS]),
        columns=_renamed(_OF_STEP, values),
        gradients=_renamed(_OF_GRADIENTS, values),
        complete=values[_COMPLETE] == 1.0,
    )


def _renamed(names: Mapping[str, str], values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that `names` has, under the other name."""
    return {other: values[name] for name, other in names.items() if name in values}
