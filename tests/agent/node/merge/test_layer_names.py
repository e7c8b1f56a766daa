"""Layers of equal name: one tensor or several?"""

from mp_agent.node.merge import node_layers
from mp_agent.node.merge.node_layers import LayerNames, RankLayers
from mp_agent.records.schema import Share
from tests.agent.node.builders import gradient_row, make_schema, rank_layers
from tests.agent.node.nodes import merge_node_layers


def table(rank: int, share: Share, *names: str) -> RankLayers:
    rows = gradient_row(sum_squares=rank + 1.0, elements=1.0)[None].repeat(len(names), axis=0)
    return rank_layers(rank, make_schema(share, layers=names), rows)


def stage(rank: int, ranks_per_stage: int = 2) -> Share:
    first = rank // ranks_per_stage * ranks_per_stage
    return Share(
        group=f"stage of {first}",
        replica_index=rank - first,
        replica_count=ranks_per_stage,
        home=f"{first}-{first + ranks_per_stage - 1}",
    )


def test_stages_with_equal_names_are_told_apart_by_their_ranks():
    tables = [table(r, stage(r), "0.weight", f"only{r // 2}") for r in range(4)]
    merged = merge_node_layers([tables[:2], tables[2:]])

    assert merged.names == ("0.weight@0-1", "only0", "0.weight@2-3", "only1")
    assert merged.values[:, 0].tolist() == [1.0, 1.0, 3.0, 3.0]
    assert merged.complete


def test_replicas_and_shards_of_one_home_are_one_layer():
    shares = [Share(group="g", shard_index=r, shard_count=2, home="0-1") for r in range(2)]
    merged = merge_node_layers([[table(r, shares[r], "w")] for r in range(2)])

    assert merged.names == ("w",)
    assert merged.values[0, 0] == 3.0


def test_a_name_that_turns_out_to_be_several_is_not_used_any_more():
    names = LayerNames()
    first = merge_node_layers([[table(0, stage(0, 1), "w", "b")]], 2, names=names)
    assert first.names == ("w", "b")

    both = [[table(r, stage(r, 1), "w")] for r in range(2)]
    second = merge_node_layers(both, 2, names=names)
    assert second.names == ("w@0-0", "w@1-1")
    assert second.retired == {"w"}

    third = merge_node_layers([[table(0, stage(0, 1), "w", "b")]], 2, names=names)
    assert third.names == ("w@0-0", "b"), "it keeps the name although it is alone this time"


def test_names_that_are_always_others_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(node_layers, "_NAMES_KEPT", 10)
    names = LayerNames()
    for number in range(50):
        merged = merge_node_layers([[table(0, stage(0, 1), f"w{number}", "b")]], 2, names=names)
        assert merged.names == (f"w{number}", "b")
    assert len(names._known) <= 12


def test_models_of_two_optimizers_are_told_apart():
    schema = make_schema(
        Share(group="g", home="0"), Share(group="d", home="0", optimizer="1"), layers=("w", "w")
    )
    rows = gradient_row(sum_squares=1.0)[None].repeat(2, axis=0)
    merged = merge_node_layers([[rank_layers(0, schema, rows)]])

    assert merged.names == ("w", "w@optimizer1")
    assert merged.optimizers == ("", "1")
    judged = merged.judged_of({""}).views(step_judged=True)
    assert [view.judged for view in judged] == [True, False]
