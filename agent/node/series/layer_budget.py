"""Keeps the layers of a run within `max_series`: which are shown, and which are rolled up.

Keeps the layers of a run within the number of series that may be exported.
Beyond it, the worst layers keep their own series and the others are shown together, by module.
Who has its own series changes as rarely as can be, and every counted event is shown once: in the
layer's own series or in a roll-up, whichever stood for the layer when it was first exported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from operator import is_

from mp_agent.catalog.metric import HistogramValue, Metric
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.node.accounting.accumulator import CounterStore, Labels
from mp_agent.records.columns import FAMILIES, GRADIENTS, ColumnFamily
from mp_agent.records.views import LayerView

EVERYTHING = "*"


def rollup_label(layer: str, depth: int) -> str:
    """Return the label under which a layer is rolled up, of at most `depth` names of modules.

    `layers.0.attn.q.weight` is of `layers.0.attn.q.*`, or of `layers.*` at depth 1.
    """
    name, at, home = layer.partition("@")
    parents = name.split(".")[:-1][:depth]
    return ".".join((*parents, EVERYTHING)) + at + home if parents else EVERYTHING


def depth_that_fits(layers: Iterable[str], rollups_at_most: int) -> int:
    """Return the greatest depth at which the layers have no more roll-ups than that."""
    names = list(layers)
    depth = max((name.count(".") for name in names), default=0)
    while depth and len({rollup_label(name, depth) for name in names}) > rollups_at_most:
        depth -= 1
    return depth


def union(name: str, layers: Sequence[LayerView], family: ColumnFamily = GRADIENTS) -> LayerView:
    """Return layers of a family as one: their union, of those whose norms count, if any do."""
    judged = [layer for layer in layers if layer.judged]
    of = judged or layers
    values = family.merged([[each.values.get(own, nan) for own in family.names] for each in of])
    sound = all(column in values for column in family.required)
    step = min(each.step for each in of)
    return LayerView(
        name=name, values=values, judged=bool(judged) and sound, family=family.name, step=step
    )


_NONFINITE = BY_PROMETHEUS_NAME["mp_agent_layer_grad_nonfinite_elements_total"]

_MUCH_WORSE = 2.0
"""How many times as large a norm must be to take the series of another layer."""
_SLACK = 20
"""One part in so many of the room is left free, so that it may shrink a little unnoticed."""
_GROWTH = 1.2

Shown = tuple[str, Labels, float]
"""Metric, labels, and how much of a counter was shown."""

_Basis = tuple[Sequence[LayerView], list[Shown], int]
"""Layers, their counters, and the room: nothing else decides what is shown."""


@dataclass(slots=True, kw_only=True)
class LayerBudgetState:
    """What must survive a restart, so that no counter shows an event twice."""

    capacity: int | None = None
    """Layers and roll-ups that are exported at most; None while there was room for all layers."""
    depth: int = 0
    """Modules in the name of a roll-up; only ever less."""
    own: list[str] = field(default_factory=list)
    """Layers with their own series."""
    in_rollups: list[Shown] = field(default_factory=list)
    """How much of each layer's counters was shown by roll-ups."""
    by_rollups: list[Shown] = field(default_factory=list)
    """How much each roll-up has shown."""
    by_layers: list[Shown] = field(default_factory=list)
    """How much of each layer's counters was shown by its own series."""


class LayerCounters(CounterStore):
    """A run's counters as they are exported: each roll-up with its share."""

    def __init__(self, whole: CounterStore, shown: dict[tuple[str, Labels], float]) -> None:
        super().__init__()
        self._whole = whole
        self._shown = shown

    def total(self, metric: Metric, labels: Labels) -> float:
        """Return what the series shows of a counter."""
        shown = self._shown.get((metric.name, labels))
        return self._whole.total(metric, labels) if shown is None else shown

    def later(self, metric: Metric) -> list[Labels]:
        """Return the labels of a metric's series that are not known beforehand."""
        return self._whole.later(metric)

    def histogram(self, metric: Metric, labels: Labels) -> HistogramValue:
        """Return a histogram's present value."""
        return self._whole.histogram(metric, labels)


class LayerBudget:
    """Decides which layers of one run have their own series."""

    def __init__(
        self,
        state: LayerBudgetState | None = None,
        families: Sequence[ColumnFamily] = FAMILIES,
    ) -> None:
        self._families = {family.name: family for family in families}
        state = state or LayerBudgetState()
        self._capacity = state.capacity
        self._depth = state.depth
        self._own = dict.fromkeys(state.own)
        self._in_rollups = _schema_index(state.in_rollups)
        self._by_rollups = _schema_index(state.by_rollups)
        self._by_layers = _schema_index(state.by_layers)
        self._showed_all = False
        """Whether every layer had its own series until now."""
        self._unions: dict[tuple[str, str], tuple[list[LayerView], LayerView]] = {}
        """Unions of layers, by family and label."""
        self._fitting: tuple[int, tuple[str, ...], int] | None = None
        """Capacity, names of layers, and the depth that fits them."""
        self._last: tuple[_Basis, list[LayerView], CounterStore] | None = None

    @property
    def state(self) -> LayerBudgetState:
        """What to keep over a restart."""
        return LayerBudgetState(
            capacity=self._capacity,
            depth=self._depth,
            own=list(self._own),
            in_rollups=_entries(self._in_rollups),
            by_rollups=_entries(self._by_rollups),
            by_layers=_entries(self._by_layers),
        )

    def govern(
        self,
        layers: Sequence[LayerView],
        counters: CounterStore,
        metrics: Sequence[Metric],
        room: int,
    ) -> tuple[list[LayerView], CounterStore]:
        """Return the layers and roll-ups to export, and the counters they show.

        At most `room` of each family, and the same of every family. metrics: the counters of
        layers.
        """
        number = len({layer.name for layer in layers})
        if not layers or (self._capacity is None and number <= room):
            self._showed_all = self._showed_all or bool(layers)
            return list(layers), counters
        names = {metric.name for metric in metrics}
        counted = list(counters.entries(names))
        if self._capacity is None and self._showed_all:
            self._by_layers = _schema_index(counted)
        basis = (tuple(layers), counted, room)
        if self._last is None or not _same_basis(self._last[0], basis):
            self._last = (basis, *self._arrange(layers, counters, counted, room))
        return self._last[1], self._last[2]

    def _arrange(
        self, layers: Sequence[LayerView], counters: CounterStore, counted: list[Shown], room: int
    ) -> tuple[list[LayerView], CounterStore]:
        names = tuple(dict.fromkeys(layer.name for layer in layers))
        self._settle_capacity(names, room)
        labels = {name: rollup_label(name, self._depth) for name in names}
        gradients = {view.name: view for view in layers if view.family == GRADIENTS.name}
        badness = {name: _badness(name, gradients.get(name), counters) for name in names}
        self._choose(badness, rollups=len(set(labels.values())))
        shown = [layer for layer in layers if layer.name in self._own]
        children: dict[tuple[str, str], list[LayerView]] = {}
        for layer in layers:
            if layer.name not in self._own:
                children.setdefault((layer.family, labels[layer.name]), []).append(layer)
        if self._capacity:
            shown += [self._union(*key, found) for key, found in children.items()]
        return shown, LayerCounters(counters, self._share(counted))

    def _settle_capacity(self, names: tuple[str, ...], room: int) -> None:
        """Follow the room in large steps only: what else is exported comes and goes."""
        first = self._capacity is None
        if first or room < (self._capacity or 0) or room > _GROWTH * (self._capacity or 0):
            self._capacity = max(room - room // _SLACK, 0)
        capacity = self._capacity or 0
        if self._fitting is None or self._fitting[:2] != (capacity, names):
            depth = depth_that_fits(names, max(capacity // 2, 1))
            self._fitting = (capacity, names, depth)
        self._depth = self._fitting[2] if first else min(self._depth, self._fitting[2])

    def _choose(self, badness: Mapping[str, tuple[float, float]], *, rollups: int) -> None:
        """Keep who has its own series, but for the very much worse."""
        capacity = self._capacity or 0
        places = len(badness)
        if places > capacity:
            places = max(capacity - rollups, 0)
        ordered = sorted(badness, key=lambda name: (badness[name], name), reverse=True)
        own = [name for name in ordered if name in self._own][:places]
        rest = [name for name in ordered if name not in self._own]
        own += rest[: places - len(own)]
        own.sort(key=lambda name: (badness[name], name), reverse=True)
        taken = set(own)
        rest = [name for name in ordered if name not in taken]
        for place, candidate in zip(reversed(range(len(own))), rest, strict=False):
            if not _much_worse(badness[candidate], badness[own[place]]):
                break
            own[place] = candidate
        self._own = dict.fromkeys(own)

    def _union(self, family: str, label: str, children: list[LayerView]) -> LayerView:
        known = self._unions.get((family, label))
        if known is None or not _same(known[0], children):
            known = (children, union(label, children, self._families[family]))
            self._unions[family, label] = known
        return known[1]

    def _share(self, counted: Iterable[Shown]) -> dict[tuple[str, Labels], float]:
        """Return what each series shows: what was counted since is added where the layer is now."""
        shown: dict[tuple[str, Labels], float] = {}
        for name, labels, total in counted:
            key = (name, labels)
            new = total - self._by_layers.get(key, 0.0) - self._in_rollups.get(key, 0.0)
            if new > 0 and labels[0] in self._own:
                self._by_layers[key] = self._by_layers.get(key, 0.0) + new
            elif new > 0:
                label = (name, (rollup_label(labels[0], self._depth), *labels[1:]))
                self._in_rollups[key] = self._in_rollups.get(key, 0.0) + new
                self._by_rollups[label] = self._by_rollups.get(label, 0.0) + new
            shown[key] = self._by_layers.get(key, 0.0)
        return {**shown, **self._by_rollups}


def _badness(name: str, gradients: LayerView | None, counters: CounterStore) -> tuple[float, float]:
    """Return by how much a layer deserves its own series: non-finite elements, then its norm."""
    nonfinite_elements = counters.total(_NONFINITE, (name,))
    judged = gradients is not None and gradients.judged
    return nonfinite_elements, gradients.values["sum_squares"] if gradients and judged else 0.0


def _much_worse(layer: tuple[float, float], other: tuple[float, float]) -> bool:
    if bool(layer[0]) != bool(other[0]):
        return layer[0] > 0
    return layer[0] == 0 and layer[1] > _MUCH_WORSE**2 * other[1]


def _same_basis(known: _Basis, found: _Basis) -> bool:
    return known[1:] == found[1:] and _same(known[0], found[0])


def _same(known: Sequence[LayerView], found: Sequence[LayerView]) -> bool:
    return len(known) == len(found) and all(map(is_, known, found))


def _schema_index(entries: Iterable[Shown]) -> dict[tuple[str, Labels], float]:
    return {(name, labels): amount for name, labels, amount in entries}


def _entries(schema_index: dict[tuple[str, Labels], float]) -> list[Shown]:
    return [(*key, amount) for key, amount in schema_index.items()]
