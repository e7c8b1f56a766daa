"""Layers that stand for others: the union of the children of a module."""

from collections.abc import Iterable, Sequence
from math import fsum

from mp_agent.node.merge.schema_index import ALGEBRA
from mp_agent.records.columns import Algebra
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


def union(name: str, layers: Sequence[LayerView]) -> LayerView:
    """Return layers as one: the norm of their union, of those whose norms count, if any do."""
    judged = [layer for layer in layers if layer.judged]
    of = judged or layers
    columns = [column for column in of[0].values if all(column in each.values for each in of)]
    return LayerView(
        name=name,
        values={
            column: _combine(column, [each.values[column] for each in of]) for column in columns
        },
        judged=bool(judged),
    )


def _combine(column: str, values: Sequence[float]) -> float:
    algebra = ALGEBRA.get(column, Algebra.MAX)
    if algebra is Algebra.SUM:
        return fsum(values)
    return min(values) if algebra is Algebra.MIN else max(values)
