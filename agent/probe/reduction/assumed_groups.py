"""Judges tensors that no wrapper explains: copies on all ranks, or each rank's own."""

from mp_agent.probe.reduction.layout import TensorGroup


class AssumedGroups:
    """What is known of them. Equal on all ranks, since it follows from reduced numbers alone.

    The node agents judge alike, and find copies that only some of the ranks hold besides.
    """

    def __init__(self) -> None:
        self._copies: set[TensorGroup] = set()
        self._differ: set[TensorGroup] = set()

    def learn(self, group: TensorGroup, *, copies: bool, equal: bool) -> None:
        """Add a step: whether anything showed copies, and whether all ranks had the same row."""
        if copies:
            self._copies.add(group)
        elif not equal:
            self._differ.add(group)

    def independent(self, group: TensorGroup) -> bool:
        """Return whether each rank has tensors of its own: their rows add up."""
        return group in self._differ and group not in self._copies

    def replicated(self, group: TensorGroup) -> bool:
        """Return whether ranks are known to hold copies: the first rank's row counts."""
        return group in self._copies
