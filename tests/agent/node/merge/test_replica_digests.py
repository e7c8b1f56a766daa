"""Replicas that should be equal and are not."""

import dataclasses

import pytest

from mp_agent.node.merge.coverage import AssumedShares
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.merged import Comparison
from mp_agent.records.schema import Schema, Share
from tests.agent.node.builders import gradient_row, make_record, make_schema
from tests.agent.node.nodes import merge_nodes

AGREE = Comparison(agree=True)


def with_weights(schema: Schema) -> Schema:
    """Return a schema that has weight digests, whether or not all have them by now."""
    if "weight_digest" in schema.step_columns:
        return schema
    return Schema(
        step_columns=(*schema.step_columns, "weight_digest"),
        families=schema.families,
        shares=schema.shares,
        layers=schema.layers,
    )


def rank_step(rank: int, share: Share, digest: float = float("nan"), **row: float) -> RankStep:
    import numpy as np

    schema = with_weights(make_schema(share))
    values = dict.fromkeys(schema.step_columns, float("nan"))
    values |= {"weight_digest": digest, "skipped": row.pop("skipped", 0.0)}
    plain = make_record(1, {}, [gradient_row(elements=4.0, **row)])
    record = type(plain)(
        sequence=1,
        step=1,
        time_unix_ns=plain.time_unix_ns,
        values=np.array([values[name] for name in schema.step_columns]),
        families=plain.families,
    )
    return RankStep(rank, schema, record)


def ddp(rank: int, count: int) -> Share:
    return Share(group="ddp", replica_index=rank, replica_count=count)


def compare(norms: list[float], nodes: list[list[int]], **row: float):
    steps = [rank_step(r, ddp(r, len(norms)), sum_squares=n, **row) for r, n in enumerate(norms)]
    return merge_nodes([[steps[rank] for rank in ranks] for ranks in nodes]).replicas


@pytest.mark.parametrize("nodes", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [0, 2], [1]]])
class TestGradients:
    def test_equal_ones_agree(self, nodes):
        assert compare([4.0] * 4, nodes) == {"gradients": AGREE}

    def test_the_rank_that_differs_from_the_majority_is_named(self, nodes):
        assert compare([4.0, 4.0, 4.0 + 1e-15, 4.0], nodes)["gradients"] == Comparison(
            agree=False, minority_ranks=(2,)
        )

    def test_without_a_majority_nobody_is_named(self, nodes):
        assert compare([4.0, 4.0, 5.0, 5.0], nodes)["gradients"] == Comparison(agree=False)

    def test_beside_a_nan_only_the_counts_must_agree(self, nodes):
        assert compare([1.0, 2.0, 3.0, 4.0], nodes, nan_elements=1.0) == {"gradients": AGREE}

    def test_on_a_skipped_step_nothing_is_compared(self, nodes):
        assert compare([1.0, 2.0, 3.0, 4.0], nodes, skipped=1.0) == {}

    def test_negative_zero_is_zero(self, nodes):
        steps = [
            rank_step(r, ddp(r, 4), sum_squares=0.0, abs_max=-0.0 if r else 0.0) for r in range(4)
        ]
        merged = merge_nodes([[steps[rank] for rank in ranks] for ranks in nodes])
        assert merged.replicas == {"gradients": AGREE}


def test_counts_that_differ_beside_a_nan_are_a_divergence():
    steps = [rank_step(r, ddp(r, 3), nan_elements=1.0 + (r == 1)) for r in range(3)]
    assert merge_nodes([steps]).replicas["gradients"].minority_ranks == (1,)


def test_one_rank_alone_has_nothing_to_compare_with():
    assert merge_nodes([[rank_step(0, ddp(0, 1))]]).replicas == {}
    assert merge_nodes([[rank_step(0, ddp(0, 2))]], 2).replicas == {}


def test_of_hybrid_shards_the_one_rank_is_named_wherever_it_is():
    def share(rank: int) -> Share:
        return Share(
            group="hsdp",
            shard_index=rank % 2,
            shard_count=2,
            replica_index=rank // 2,
            replica_count=3,
        )

    steps = [rank_step(r, share(r), sum_squares=9.0 if r == 3 else 1.0 + r % 2) for r in range(6)]
    for nodes in ([range(6)], [[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 2, 4, 5]]):
        merged = merge_nodes([[steps[rank] for rank in ranks] for ranks in nodes])
        assert merged.replicas["gradients"].minority_ranks == (3,)


def test_shards_that_nobody_else_has_are_not_compared():
    steps = [
        rank_step(
            r, Share(group="fsdp", shard_index=r, shard_count=3), digest=float(r), sum_squares=r
        )
        for r in range(3)
    ]
    assert merge_nodes([steps]).replicas == {}


class TestWeights:
    def test_that_drifted_apart_are_found_though_the_gradients_agree(self):
        steps = [rank_step(r, ddp(r, 3), digest=7.0 + (r == 2)) for r in range(3)]
        replicas = merge_nodes([steps[:1], steps[1:]]).replicas

        assert replicas["gradients"] == AGREE
        assert replicas["weights"] == Comparison(agree=False, minority_ranks=(2,))

    def test_of_ranks_that_hold_other_shards_are_not_compared(self):
        def share(rank: int) -> Share:
            return Share(
                group="hsdp",
                shard_index=rank % 2,
                shard_count=2,
                replica_index=rank // 2,
                replica_count=2,
            )

        steps = [rank_step(r, share(r), digest=float(r % 2)) for r in range(4)]
        assert merge_nodes([steps]).replicas["weights"] == AGREE

    def test_of_plain_parameters_are_compared_once_they_are_known_to_be_replicas(self):
        share = Share(group="plain", assumed=True)
        steps = [rank_step(r, share, digest=float(r), sum_squares=1.0) for r in range(3)]
        assumed = AssumedShares()
        seen = [merge_nodes([steps], assumed=assumed).replicas for _ in range(4)]

        assert seen[0] == seen[1] == {}
        assert seen[3] == {"weights": Comparison(agree=False)}

    def test_of_independent_models_are_never_compared(self):
        share = Share(group="plain", assumed=True)
        steps = [rank_step(r, share, digest=float(r), sum_squares=1.0 + r) for r in range(3)]
        assert merge_nodes([steps]).replicas == {}


def local_steps(digests: list[float], norms: list[float], *, reduced: list[float], **row: float):
    """Ranks of DDP of which some say whether their gradients were reduced."""
    steps = []
    for rank, (digest, norm) in enumerate(zip(digests, norms, strict=True)):
        plain = rank_step(rank, ddp(rank, len(norms)), digest, sum_squares=norm, **row)
        values = plain.record.values.copy()
        values[plain.schema.step_columns.index("gradients_reduced")] = reduced[rank]
        record = dataclasses.replace(plain.record, values=values)
        steps.append(RankStep(rank, plain.schema, record))
    return merge_nodes([steps[:1], steps[1:]]).replicas


class TestReplicasThatStepWithTheirOwnGradients:
    def test_are_not_said_to_diverge(self):
        assert local_steps([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], reduced=[0.0] * 3) == {}

    def test_are_found_equal_once_they_have_synchronised(self):
        replicas = local_steps([1.0] * 3, [4.0, 5.0, 6.0], reduced=[0.0] * 3)
        assert replicas == {"weights": AGREE}

    def test_one_rank_that_did_not_reduce_is_enough(self):
        assert local_steps([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], reduced=[1.0, 0.0, 1.0]) == {}

    def test_equal_gradients_show_that_they_were_reduced_after_all(self):
        replicas = local_steps([1.0, 2.0, 1.0], [4.0] * 3, reduced=[0.0] * 3)
        assert replicas["gradients"] == AGREE
        assert replicas["weights"] == Comparison(agree=False, minority_ranks=(1,))

    @pytest.mark.parametrize("row", [{"nan_elements": 4.0}, {}])
    def test_gradients_without_a_number_in_them_show_nothing(self, row):
        replicas = local_steps([1.0, 2.0, 1.0], [0.0] * 3, reduced=[0.0] * 3, **row)
        assert "weights" not in replicas

    def test_the_same_differences_after_a_reduction_are_a_divergence(self):
        replicas = local_steps([1.0, 2.0, 1.0], [4.0, 5.0, 4.0], reduced=[1.0] * 3)
        assert not replicas["gradients"].agree
        assert not replicas["weights"].agree

    def test_plain_replicas_may_drift_while_their_gradients_differ(self):
        share = Share(group="plain", assumed=True)

        def merged(norms: list[float], digests: list[float]):
            steps = [
                rank_step(r, share, digest=d, sum_squares=n)
                for r, (n, d) in enumerate(zip(norms, digests, strict=True))
            ]
            return merge_nodes([steps], assumed=assumed).replicas

        assumed = AssumedShares()
        for _ in range(4):
            merged([1.0] * 3, [7.0] * 3)
        assert merged([1.0, 2.0, 3.0], [7.0, 8.0, 9.0]) == {}
        assert merged([1.0] * 3, [7.0] * 3) == {"weights": AGREE}
        assert merged([1.0] * 3, [7.0, 7.0, 8.0])["weights"].minority_ranks == (2,)
