import numpy as np
import pytest

from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENT_POSITIONS
from mp_agent.records.schema import Share
from tests.agent.node.builders import gradient_row, make_schema, rank_layers
from tests.agent.node.nodes import merge_node_layers


def merge(tables: list[RankLayers], world_size: int | None = None):
    return merge_node_layers([tables], world_size)


def fsdp_tables(rows_by_rank: list[list[np.ndarray]], names: tuple[str, ...]) -> list[RankLayers]:
    return [
        rank_layers(
            rank,
            make_schema(
                Share(group="fsdp", shard_index=rank, shard_count=len(rows_by_rank)), layers=names
            ),
            np.stack(rows),
        )
        for rank, rows in enumerate(rows_by_rank)
    ]


def test_shards_of_each_layer_add_up_by_the_columns_algebra():
    generator = np.random.default_rng(1)
    rows = generator.uniform(0, 9, size=(3, 5, len(GRADIENT_COLUMN_NAMES)))
    names = tuple(f"layers.{i}.weight" for i in range(5))

    merged = merge(fsdp_tables([list(r) for r in rows], names))

    expected = rows.sum(axis=0)
    for name, fold in (("abs_max", np.max), ("abs_min", np.min)):
        position = GRADIENT_POSITIONS[name]
        expected[:, position] = fold(rows[..., position], axis=0)
    assert merged.names == names
    assert merged.values == pytest.approx(expected)
    assert merged.complete


def test_replicated_layers_count_once():
    tables = [
        rank_layers(
            rank,
            make_schema(Share(group="ddp", replica_index=rank, replica_count=2), layers=("w", "b")),
            np.stack([gradient_row(sum_squares=4.0), gradient_row(sum_squares=1.0)]),
        )
        for rank in range(2)
    ]
    views = merge(tables).views(step_judged=True)

    assert [(v.name, v.values["sum_squares"], v.judged) for v in views] == [
        ("w", 4.0, True),
        ("b", 1.0, True),
    ]


def test_norms_do_not_count_on_a_step_whose_norm_does_not():
    views = merge(fsdp_tables([[gradient_row()]], ("w",))).views(step_judged=False)

    assert [view.judged for view in views] == [False]


def test_norms_of_a_table_with_a_missing_shard_do_not_count():
    one_of_two = fsdp_tables([[gradient_row()], [gradient_row()]], ("w",))[:1]
    views = merge(one_of_two, world_size=2).views(step_judged=True)

    assert [view.judged for view in views] == [False]


def test_layers_of_equal_name_in_different_stages_become_their_union():
    tables = [
        rank_layers(
            rank,
            make_schema(Share(group=f"stage{rank}"), layers=("0.weight", f"own{rank}")),
            np.stack([gradient_row(sum_squares=rank + 1.0), gradient_row()]),
        )
        for rank in range(2)
    ]
    merged = merge(tables)

    assert merged.names == ("0.weight", "own0", "own1")
    assert merged.views(step_judged=True)[0].values["sum_squares"] == 3.0


def test_the_nonfinite_layer_nearest_the_output_is_the_last_in_module_order():
    rows = [gradient_row(nan_elements=1.0), gradient_row(inf_elements=2.0), gradient_row()]

    assert merge(fsdp_tables([rows], ("in", "middle", "out"))).nonfinite_nearest_output() == (
        "middle"
    )
    assert merge(fsdp_tables([rows[2:]], ("out",))).nonfinite_nearest_output() == ""


def test_a_sum_beyond_float64_is_shown_as_uncounted_and_finite():
    rows = [[gradient_row(sum_squares=1e308)], [gradient_row(sum_squares=1e308)]]
    with np.errstate(over="ignore"):
        (view,) = merge(fsdp_tables(rows, ("w",))).views(step_judged=True)

    assert not view.judged
    assert all(np.isfinite(list(view.values.values())))


def test_a_layer_that_was_not_observed_does_not_count():
    table = rank_layers(
        0, make_schema(layers=("w",)), np.full((1, len(GRADIENT_COLUMN_NAMES)), np.nan)
    )
    (view,) = merge([table]).views(step_judged=True)

    assert not view.judged
    assert view.values == {}


def test_names_that_cannot_be_written_as_utf8_are_made_so():
    merged = merge(fsdp_tables([[gradient_row()]], ("w\ud800",)))

    assert merged.names == ("w?",)


def test_no_layers_at_all_merge_to_none():
    table = rank_layers(0, make_schema(layers=()), np.empty((0, len(GRADIENT_COLUMN_NAMES))))
    merged = merge([table])

    assert merged.views(step_judged=True) == ()
    assert merged.nonfinite_nearest_output() == ""
