"""Which metrics of layers are exported when not all of them fit into `max_series`."""

from collections.abc import Mapping, Sequence

from mp_agent.catalog.metric import Metric, Scope
from mp_agent.records.columns import ColumnFamily

_SPACE = 1.2
"""How much more room than needed there must be before metrics that gave way come back."""


def giving_way(
    metrics: Sequence[Metric], families: Sequence[ColumnFamily]
) -> tuple[frozenset[Metric], ...]:
    """Return what is left out at each level, from nothing to all that gives way.

    First, family by family from the last one on, the gauges that say `gives_way`; then, in the same
    order, all gauges of a family. The first family keeps its own, and counters never give way:
    layers are rolled up instead.
    """
    steps = [
        *({m for m in metrics if m.gives_way and m.family == f.name} for f in reversed(families)),
        *(
            {m for m in metrics if m.read is not None and m.family == f.name}
            for f in reversed(families[1:])
        ),
    ]
    levels: list[frozenset[Metric]] = [frozenset()]
    for step in steps:
        if step - levels[-1]:
            levels.append(levels[-1] | step)
    return tuple(levels)


class LayerMetrics:
    """Decides which metrics of layers give way; they come back once there is space again."""

    def __init__(self, metrics: Sequence[Metric], families: Sequence[ColumnFamily]) -> None:
        self.all = tuple(metric for metric in metrics if metric.scope is Scope.LAYER)
        self._levels = giving_way(self.all, families)
        self._level = 0

    def choose(
        self, layers: Mapping[str, int], series: Mapping[Metric, int], room: int
    ) -> tuple[Metric, ...]:
        """Return those to export in a number of series.

        layers: numbers of layers, by family. series: of one layer, by metric.
        """
        for level, hidden in enumerate(self._levels):
            shown = tuple(metric for metric in self.all if metric not in hidden)
            needed = sum(layers.get(metric.family, 0) * series[metric] for metric in shown)
            if needed * (_SPACE if level < self._level else 1.0) <= room:
                break
        self._level = level
        return shown
