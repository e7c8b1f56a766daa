"""The layer tables of several ranks become one table of the run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mp_agent.node.merge import ALGEBRA
from mp_agent.node.shares import AssumedShares, BlockKey, Roster
from mp_agent.records.columns import Algebra
from mp_agent.records.merged import LayerView
from mp_agent.records.schema import Schema
from mp_agent.records.steps import FloatArray

_FOLD = {
    Algebra.SUM: (np.add, 0.0),
    Algebra.MAX: (np.maximum, -np.inf),
    Algebra.MIN: (np.minimum, np.inf),
}


@dataclass(frozen=True, slots=True, eq=False)
class RankLayers:
    """One rank's layer table of a step: rows [L, C], with the schema they were written under."""

    rank: int
    schema: Schema
    rows: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class MergedLayers:
    """The layers of the run at one sampled step, in module order.

    values: [L, C] finite. sound: [L] whether all of the layer's numbers could be represented.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: FloatArray
    sound: npt.NDArray[np.bool_]
    complete: bool
    """Whether every shard of every tensor was present."""

    def views(self, *, step_judged: bool) -> tuple[LayerView, ...]:
        """Return one view per layer; norms count only where those of the step do."""
        judged = (self.sound & (step_judged and self.complete)).tolist()
        return tuple(
            LayerView(name=name, values=dict(zip(self.columns, row, strict=True)), judged=counts)
            for name, row, counts in zip(self.names, self.values.tolist(), judged, strict=True)
        )

    def nonfinite_nearest_output(self) -> str:
        """Return the last layer, in module order, with a NaN or Inf element; "" if there is none.

        Backward runs from the output, so that is where a value born in backward began.
        """
        indices = [self.columns.index(name) for name in ("nan_elements", "inf_elements")]
        found = np.flatnonzero(self.values[:, indices].sum(axis=1))
        return self.names[found[-1]] if found.size else ""


def merge_layers(
    tables: Sequence[RankLayers], roster: Roster, assumed: AssumedShares
) -> MergedLayers:
    """Return the ranks' tables as one: of equal replicas one is taken, shards add up.

    Layers of equal name in different groups (stages, experts) become one row: the norm of their
    union.
    """
    tables = sorted(tables, key=lambda table: table.rank)
    names: dict[str, int] = {}
    blocks: set[BlockKey] = set()
    rows, targets = [], []
    taken: set[tuple[int, BlockKey]] = set()
    for table in tables:
        sources, into = _untaken(table, assumed, names, taken)
        keep = ~np.isnan(table.rows[sources]).any(axis=1)
        rows.append(table.rows[sources][keep])
        targets.append(into[keep])
        blocks.update(assumed.key(share, table.rank) for share in table.schema.shares)
    columns = tables[0].schema.gradient_columns
    values = _fold(np.concatenate(rows), np.concatenate(targets), columns, len(names))
    finite = np.isfinite(values)
    return MergedLayers(
        names=tuple(names),
        columns=columns,
        values=np.where(finite, values, 0.0),
        sound=np.logical_and.reduce(finite, axis=1),
        complete=roster.complete(blocks, assumed),
    )


def _untaken(
    table: RankLayers,
    assumed: AssumedShares,
    names: dict[str, int],
    taken: set[tuple[int, BlockKey]],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return which rows of a table enter the merge, and at which index of `names` each lands."""
    keys = [assumed.key(share, table.rank) for share in table.schema.shares]
    sources, targets = [], []
    for row, layer in enumerate(table.schema.layers):
        target = names.setdefault(_utf8(layer.name), len(names))
        if (target, keys[layer.share]) not in taken:
            taken.add((target, keys[layer.share]))
            sources.append(row)
            targets.append(target)
    return np.array(sources, dtype=np.intp), np.array(targets, dtype=np.intp)


def _utf8(name: str) -> str:
    """Return a name that can be written as UTF-8: lone surrogates become question marks."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _fold(
    rows: FloatArray, targets: npt.NDArray[np.intp], columns: Sequence[str], layers: int
) -> FloatArray:
    """Return [layers, C]: the rows [N, C] folded into their target layers."""
    merged = np.empty((layers, len(columns)))
    for index, name in enumerate(columns):
        fold, identity = _FOLD[ALGEBRA[name]]
        merged[:, index] = identity
        fold.at(merged[:, index], targets, rows[:, index])
    return merged
