"""Layers that stand for others: the union of the children of a module."""

from collections.abc import Iterable, Sequence
from math import nan

from mp_agent.records.columns import GRADIENTS, ColumnFamily
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
