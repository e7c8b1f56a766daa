"""Judges tensors that no wrapper explains: copies on all ranks, or each rank's own."""

from mp_agent.probe.reduction.layout import TensorGroup

AGREED_STEPS = 3
"""Steps with equal rows after which ranks hold copies for good, as the node agents judge."""


class AssumedGroups:
    """What is known of them. Equal on all ranks, since it follows from reduced numbers alone."""

    def __init__(self) -> None:
        self._verdicts: dict[TensorGroup, bool] = {}
        """Final verdicts: whether each rank has tensors of its own."""
        self._agreed: dict[TensorGroup, int] = {}

    def observe(self, group: TensorGroup, rows: int, *, equal: bool) -> None:
        """Add a step: how many ranks had a row, and whether all rows were equal."""
        if group in self._verdicts or rows < 2:
            return
        if not equal:
            self._verdicts[group] = True
            return
        self._agreed[group] = self._agreed.get(group, 0) + 1
        if self._agreed[group] >= AGREED_STEPS:
            self._verdicts[group] = False

    def independent(self, group: TensorGroup) -> bool:
        """Return whether each rank has tensors of its own: their rows add up."""
        return self._verdicts.get(group, False)

    def replicated(self, group: TensorGroup) -> bool:
        """Return whether ranks are known to hold copies: the first rank's row counts."""
        return self._verdicts.get(group) is False
