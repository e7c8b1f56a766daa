"""Which rows of several tables are of the same layer, and what each layer is called."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mp_agent.records.reports.rows import Layout

Identity = tuple[str, str, str]
"""Name, home and optimizer of a layer: equal names elsewhere are other tensors."""


@dataclass(frozen=True, slots=True)
class LayerSource:
    """A table whose layers are to be named."""

    layout: Layout
    rank: int
    """The lowest that wrote of it; gives the layers their order."""
    home: str
    optimizer: str

    @property
    def key(self) -> tuple[bytes, int, str, str]:
        """What decides of the names."""
        return (self.layout.digest, self.rank, self.home, self.optimizer)


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """Where the layers of some tables land, in module order."""

    labels: tuple[str, ...]
    optimizers: tuple[str, ...]
    targets: tuple[npt.NDArray[np.intp], ...]
    """Per table, the index into `labels` of each of its layers."""
    retired: frozenset[str]
    """Labels that earlier plans used and that stand for no layer any more."""


class LayerNames:
    """Remembers every layer of the run; a name that turned out to be several keeps its suffix."""

    def __init__(self) -> None:
        self._known: dict[str, set[Identity]] = {}
        self._last: tuple[tuple[object, ...], LayerPlan] | None = None

    def plan(self, sources: Sequence[LayerSource]) -> LayerPlan:
        """Return where the layers of the tables land."""
        key = tuple(source.key for source in sources)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make_plan(sources))
        return self._last[1]

    def _make_plan(self, sources: Sequence[LayerSource]) -> LayerPlan:
        places: dict[Identity, tuple[int, int]] = {}
        tables: list[list[Identity]] = []
        for source in sources:
            own = [(name, source.home, source.optimizer) for name in source.layout.names]
            tables.append(own)
            for identity, position in zip(own, source.layout.positions, strict=True):
                place = (source.rank, position)
                places[identity] = min(place, places.get(identity, place))
        order = sorted(places, key=places.__getitem__)
        for identity in order:
            self._known.setdefault(identity[0], set()).add(identity)
        index = {identity: number for number, identity in enumerate(order)}
        labels = tuple(map(self._label, order))
        return LayerPlan(
            labels=labels,
            optimizers=tuple(optimizer for _, _, optimizer in order),
            targets=tuple(np.array([index[i] for i in own], dtype=np.intp) for own in tables),
            retired=frozenset(self._ambiguous()) - set(labels),
        )

    def _label(self, identity: Identity) -> str:
        """Return a layer's label: its name, and where that is not enough, home and optimizer."""
        name, home, optimizer = identity
        alike = self._known[name]
        label = name
        if len({home for _, home, _ in alike}) > 1 and home:
            label += f"@{home}"
        if len({other for _, own, other in alike if own == home}) > 1 and optimizer:
            label += f"@optimizer{optimizer}"
        return label

    def _ambiguous(self) -> Iterable[str]:
        return (name for name, alike in self._known.items() if len(alike) > 1)
