"""The layer tables of several nodes become one table of the run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mp_agent.node.merge.coverage import (
    AssumedShares,
    ExpectedShares,
    GroupKey,
    assumed_name,
    group_key,
)
from mp_agent.node.merge.layer_names import LayerNames, LayerSource
from mp_agent.node.merge.layer_replicas import AssumedLayers, LayerGroup
from mp_agent.records.columns import (
    GRADIENT_COLUMN_NAMES,
    GRADIENT_COLUMNS,
    GRADIENT_POSITIONS,
    NORM_COLUMNS,
    by_name,
)
from mp_agent.records.rows import LayerBlock, Layout, NodeLayers, NodeShare
from mp_agent.records.steps import FloatArray
from mp_agent.records.views import LayerView


@dataclass(frozen=True, slots=True, eq=False)
class MergedLayers:
    """The layers of the run at one sampled step, in module order.

    values: [L, C] finite, NaN where absent or beyond float64. sound: [L] whether all that a norm
    that counts comes with is there.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: FloatArray
    sound: npt.NDArray[np.bool_]
    complete: bool
    """Whether every shard of every tensor was present."""
    optimizers: tuple[str, ...] = ()
    """Which optimizer steps each layer; none: the first one all of them."""
    retired: frozenset[str] = frozenset()
    """Names that stand for no layer any more: several layers turned out to be called so."""

    def judged_of(self, judged: Collection[str]) -> "MergedLayers":
        """Return the table with only the norms that count whose optimizer's step is `judged`."""
        if not self.optimizers:
            return self
        counts = np.array([optimizer in judged for optimizer in self.optimizers], dtype=np.bool_)
        return replace(self, sound=self.sound & counts)

    def views(self, *, step_judged: bool) -> tuple[LayerView, ...]:
        """Return one view per layer; norms count only where those of the step do."""
        judged = (self.sound & (step_judged and self.complete)).tolist()
        return tuple(
            LayerView(name=name, values=by_name(self.columns, row), judged=counts)
            for name, row, counts in zip(self.names, self.values.tolist(), judged, strict=True)
        )

    def nonfinite_nearest_output(self) -> str:
        """Return the last layer, in module order, with a NaN or Inf element; "" if there is none.

        Backward runs from the output, so that is where a value born in backward began.
        """
        indices = [self.columns.index(name) for name in ("nan_elements", "inf_elements")]
        found = np.flatnonzero(np.nansum(self.values[:, indices], axis=1))
        return self.names[found[-1]] if found.size else ""


@dataclass(frozen=True, slots=True)
class ReportLayerColumns:
    """What the blocks of a node refer to."""

    gradient_columns: tuple[str, ...]
    shares: Sequence[NodeShare]
    layouts: Sequence[Layout]

    def table(self, block: LayerBlock) -> FloatArray:
        """Return a block's values [C, L] in the order of this agent's columns, NaN if absent."""
        values = np.frombuffer(block.values, dtype="<f8")
        table = values.reshape(len(self.gradient_columns), -1)
        if self.gradient_columns == GRADIENT_COLUMN_NAMES:
            return table
        fitted = np.full((len(GRADIENT_COLUMN_NAMES), table.shape[1]), np.nan)
        for index, name in enumerate(self.gradient_columns):
            if name in GRADIENT_COLUMN_NAMES:
                fitted[GRADIENT_POSITIONS[name]] = table[index]
        return fitted


class LayerMerge:
    """The layers of one sampled step as they come in, node by node, in any order."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._groups: dict[GroupKey, LayerGroup] = {}
        self._assumed: dict[GroupKey, AssumedLayers] = {}
        self._homes: dict[GroupKey, str] = {}

    def add(self, table: NodeLayers, terms: ReportLayerColumns) -> None:
        """Take a node's blocks in."""
        for block in table.blocks:
            share, layout = terms.shares[block.share], terms.layouts[block.layout]
            key, values = group_key(share), terms.table(block)
            self._homes[key] = share.home
            if share.assumed:
                self._assumed.setdefault(key, AssumedLayers()).add(block, layout, values)
            else:
                group = self._groups.setdefault(key, LayerGroup(share.shard_count))
                group.add(block, layout, values)

    def merged(
        self, expected_shares: ExpectedShares, assumed: AssumedShares, names: LayerNames
    ) -> MergedLayers:
        """Return the table: of equal replicas one is taken, shards add up.

        Layers of equal name and home in different groups become one row: the norm of their union.
        """
        chosen = {key: group.chosen() for key, group in self._groups.items()}
        whole = {key for key, group in self._groups.items() if group.complete is not None}
        for key, layers in self._assumed.items():
            independent = assumed.independent(assumed_name(key))
            chosen[key] = layers.chosen(independent=independent)
            if not independent or len(layers.ranks) == self._world_size:
                whole.add(key)
        tables = sorted(
            ((table.rank, key, table) for key, found in chosen.items() for table in found),
            key=lambda item: (*item[:2], item[2].layout.digest),
        )
        plan = names.plan(
            [
                LayerSource(table.layout, rank, self._homes[key], key[1])
                for rank, key, table in tables
            ]
        )
        values = _spread([table.values for *_, table in tables], plan.targets, len(plan.labels))
        finite = np.isfinite(values)
        needed = [GRADIENT_POSITIONS[name] for name in NORM_COLUMNS]
        return MergedLayers(
            names=plan.labels,
            columns=GRADIENT_COLUMN_NAMES,
            values=np.where(finite, values, np.nan).T,
            sound=np.logical_and.reduce(finite[needed], axis=0),
            complete=all(
                expected_shares.complete(whole, (optimizer,))
                for optimizer in {"", *plan.optimizers}
            ),
            optimizers=plan.optimizers,
            retired=plan.retired,
        )


def _spread(
    tables: Sequence[FloatArray], targets: Sequence[npt.NDArray[np.intp]], layers: int
) -> FloatArray:
    """Return [C, layers]: the tables [C, L] folded into their target layers."""
    merged = np.empty((len(GRADIENT_COLUMN_NAMES), layers))
    if not tables:
        return merged
    rows, into = np.concatenate(tables, axis=1), np.concatenate(targets)
    for index, column in enumerate(GRADIENT_COLUMNS):
        merged[index] = column.algebra.folded_into(rows[index], into, layers)
    return merged
