"""Every algebra at every stage, with absent values, against a reference of a few lines."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum, isnan, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mp_agent.errors import CatalogError
from mp_agent.node.merge import node_layers
from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.node.series.layer_budget import union
from mp_agent.probe.statistics import pieces as kernel_table
from mp_agent.probe.statistics.pieces import stretches_of
from mp_agent.records import columns
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENTS, Column, Tier
from mp_agent.records.columns import STEP_COLUMNS_BY_NAME as STEP_COLUMNS
from mp_agent.records.columns.column import Algebra
from mp_agent.records.schema import Share
from mp_agent.records.views import LayerView
from tests.agent.node.builders import gradient_row, make_record, make_schema, rank_layers, rank_step
from tests.agent.node.nodes import merge_node_layers, merge_nodes

COLUMN = "inf_elements"
"""Any gradient column, which the tests give another algebra."""

STEP_COLUMN = "tokens"

Stage = Callable[[Sequence[float]], float]


def expected(algebra: Algebra, values: Sequence[float]) -> float:
    """Return what values are together, written as plainly as can be."""
    observed = [value for value in values if not isnan(value)]
    if not observed:
        return nan
    return {
        Algebra.SUM: fsum(observed),
        Algebra.MAX: max(observed),
        Algebra.MIN: min(observed),
        Algebra.MEAN: fsum(observed) / len(observed),
    }[algebra]


@pytest.fixture
def declare(monkeypatch):
    """Return a function that gives the columns another algebra, wherever that is looked up."""

    def change(algebra: Algebra) -> None:
        if algebra is not Algebra.MEAN:
            declared = tuple(
                replace(own, algebra=algebra) if own.name == COLUMN else own
                for own in GRADIENTS.columns
            )
            # The family of the column: ring, merge and roll-ups have no other place to look it up.
            monkeypatch.setitem(GRADIENTS.__dict__, "columns", declared)
            monkeypatch.setattr(kernel_table, "GRADIENT_COLUMNS", declared)
            uncached = stretches_of.__wrapped__
            monkeypatch.setattr(kernel_table, "stretches_of", uncached)
        step_column = replace(STEP_COLUMNS[STEP_COLUMN], algebra=algebra)
        monkeypatch.setitem(STEP_COLUMNS, STEP_COLUMN, step_column)

    return change


def row(value: float) -> np.ndarray:
    return gradient_row(**{COLUMN: value, "elements": 1.0})


def shard(rank: int, count: int) -> Share:
    return Share(group="fsdp", shard_index=rank, shard_count=count)


def layers_of_one_rank(values: Sequence[float]) -> float:
    rows = torch.from_numpy(np.stack([row(value) for value in values]))
    return kernel_table.folded_rows(rows)[GRADIENT_COLUMN_NAMES.index(COLUMN)].item()


def _step(values: Sequence[float], spread: Callable[[list[Any]], list[list[Any]]]) -> float:
    steps = [
        rank_step(rank, make_record(gradients=[row(value)]), shard(rank, len(values)))
        for rank, value in enumerate(values)
    ]
    found = merge_nodes(spread(steps)).get(COLUMN)
    return nan if found is None else found


def shards_on_one_node(values: Sequence[float]) -> float:
    return _step(values, lambda steps: [steps])


def shards_on_several_nodes(values: Sequence[float]) -> float:
    return _step(values, lambda steps: [[step] for step in steps])


def groups_of_a_run(values: Sequence[float]) -> float:
    steps = [
        rank_step(rank, make_record(gradients=[row(value)]), Share(group=f"stage {rank}"))
        for rank, value in enumerate(values)
    ]
    found = merge_nodes([steps]).get(COLUMN)
    return nan if found is None else found


def _layer(tables: Sequence[RankLayers], spread: Callable[[list[Any]], list[list[Any]]]) -> float:
    (view,) = merge_node_layers(spread(list(tables))).views(step_judged=True)
    return view.values.get(COLUMN, nan)


def _layer_shards(values: Sequence[float]) -> list[RankLayers]:
    return [
        rank_layers(rank, make_schema(shard(rank, len(values))), row(value)[None])
        for rank, value in enumerate(values)
    ]


def layer_shards_on_one_node(values: Sequence[float]) -> float:
    return _layer(_layer_shards(values), lambda tables: [tables])


def layer_shards_on_several_nodes(values: Sequence[float]) -> float:
    return _layer(_layer_shards(values), lambda tables: [[table] for table in tables])


def layers_of_one_name(values: Sequence[float]) -> float:
    tables = [
        rank_layers(rank, make_schema(Share(group=f"stage {rank}")), row(value)[None])
        for rank, value in enumerate(values)
    ]
    return _layer(tables, lambda tables: [tables])


def layers_rolled_up(values: Sequence[float]) -> float:
    views = [
        LayerView(
            name=f"layers.{index}",
            values=columns.by_name(GRADIENT_COLUMN_NAMES, row(value).tolist()),
            judged=True,
        )
        for index, value in enumerate(values)
    ]
    return union("layers.*", views).values.get(COLUMN, nan)


def tables_of_ranks(values: Sequence[float]) -> float:
    tables = [row(value)[:, None] for value in values]
    folded = node_layers.fold(tables, GRADIENTS.columns)
    return float(folded[GRADIENT_COLUMN_NAMES.index(COLUMN), 0])


GRADIENT_STAGES: dict[str, Stage] = {
    stage.__name__: stage
    for stage in (
        layers_of_one_rank,
        tables_of_ranks,
        shards_on_one_node,
        shards_on_several_nodes,
        groups_of_a_run,
        layer_shards_on_one_node,
        layer_shards_on_several_nodes,
        layers_of_one_name,
        layers_rolled_up,
    )
}


def _step_column(values: Sequence[float], spread: Callable[[list[Any]], list[list[Any]]]) -> float:
    steps = [
        rank_step(
            rank,
            make_record(values={STEP_COLUMN: value}),
            Share(group="ddp", replica_index=rank, replica_count=len(values)),
        )
        for rank, value in enumerate(values)
    ]
    found = merge_nodes(spread(steps)).get(STEP_COLUMN)
    return nan if found is None else found


def ranks_of_one_node(values: Sequence[float]) -> float:
    return _step_column(values, lambda steps: [steps])


def ranks_of_several_nodes(values: Sequence[float]) -> float:
    return _step_column(values, lambda steps: [steps[:1], steps[1:]])


STEP_STAGES: dict[str, Stage] = {
    stage.__name__: stage for stage in (ranks_of_one_node, ranks_of_several_nodes)
}

NUMBERS = st.lists(st.one_of(st.just(nan), st.floats(0.0, 1e30)), min_size=1, max_size=5)


@pytest.mark.parametrize("stage", GRADIENT_STAGES)
@pytest.mark.parametrize("algebra", [Algebra.SUM, Algebra.MAX, Algebra.MIN])
def test_a_gradient_column_at_every_stage(declare, algebra, stage):
    declare(algebra)

    @settings(max_examples=25, deadline=None)
    @given(NUMBERS)
    @example([nan])
    @example([nan, nan])
    @example([3.0, nan, 5.0])
    @example([0.0, -0.0])
    def check(values: list[float]) -> None:
        found = GRADIENT_STAGES[stage](values)
        assert found == pytest.approx(expected(algebra, values), rel=1e-12, nan_ok=True)

    check()


@pytest.mark.parametrize("stage", STEP_STAGES)
@pytest.mark.parametrize("algebra", [Algebra.SUM, Algebra.MAX, Algebra.MIN, Algebra.MEAN])
def test_a_step_column_at_every_stage(declare, algebra, stage):
    declare(algebra)

    @settings(max_examples=25, deadline=None)
    @given(NUMBERS)
    @example([nan])
    @example([nan, 2.0, 4.0])
    def check(values: list[float]) -> None:
        found = STEP_STAGES[stage](values)
        assert found == pytest.approx(expected(algebra, values), rel=1e-12, nan_ok=True)

    check()


@pytest.mark.parametrize("algebra", [Algebra.MEAN, Algebra.OWN])
def test_an_algebra_that_cannot_be_folded_is_refused_for_gradients(algebra):
    with pytest.raises(CatalogError, match=f"grad_mean: algebra {algebra.value} does not exist"):
        replace(
            GRADIENTS, columns=(*GRADIENTS.columns, Column("grad_mean", algebra, "of elements"))
        )


def test_a_column_of_layers_alone_is_refused_before_one_of_totals():
    first = replace(GRADIENTS.columns[0], tier=Tier.LAYERS)
    with pytest.raises(CatalogError, match="of layers alone do not come last"):
        replace(GRADIENTS, columns=(first, *GRADIENTS.columns[1:]))


@pytest.mark.parametrize("algebra", [Algebra.SUM, Algebra.MAX, Algebra.MIN])
def test_the_identity_changes_nothing(algebra):
    for value in (0.0, 1.5, 1e308):
        assert algebra.merged([value, algebra.identity]) == value


@pytest.mark.parametrize("algebra", [Algebra.SUM, Algebra.MAX, Algebra.MIN, Algebra.MEAN])
@given(pairs=st.lists(st.tuples(st.floats(width=64), st.integers(1, 9)), min_size=1, max_size=4))
@example(pairs=[(-0.0, 3)])
@example(pairs=[(1.7e308, 9)])
@example(pairs=[(0.1, 3)])
@example(pairs=[(nan, 1), (-0.0, 2)])
def test_an_array_is_merged_as_a_list_is_bit_for_bit(algebra, pairs):
    values, counts = zip(*pairs, strict=True)
    listed = algebra.merged(values, counts)
    merged = algebra.merged_array(np.array(values), np.array(counts))
    assert (isnan(listed) and isnan(merged)) or np.float64(listed).tobytes() == np.float64(
        merged
    ).tobytes()


@pytest.mark.parametrize("algebra", [Algebra.SUM, Algebra.MAX, Algebra.MIN, Algebra.MEAN])
@given(value=st.floats(allow_nan=False))
def test_a_value_with_absent_ones_is_merged_as_it_is_alone(algebra, value):
    assert algebra.merged([value]) == algebra.merged([nan, value]) == value


def test_an_absent_value_does_not_make_a_layer_uncounted():
    table = rank_layers(0, make_schema(), row(nan)[None])
    (view,) = merge_node_layers([[table]]).views(step_judged=True)

    assert view.judged
    assert COLUMN not in view.values


def test_no_column_of_a_step_is_called_as_one_of_the_gradients():
    assert len(STEP_COLUMNS) == len(columns.STEP_COLUMNS)
    assert not STEP_COLUMNS.keys() & set(GRADIENT_COLUMN_NAMES)
