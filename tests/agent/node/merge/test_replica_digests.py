"""Replicas that should be equal and are not."""

import dataclasses
from math import isnan

import numpy as np
import pytest

from mp_agent.node.merge.coverage import AssumedShares
from mp_agent.node.merge.node_layers import RankLayers
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.columns import FEW_WEIGHTS, GRADIENTS, STATE, WEIGHTS
from mp_agent.records.merged import Comparison, MergedStep
from mp_agent.records.schema import Share, family_columns
from tests.agent.node.builders import gradient_row, make_record, make_schema
from tests.agent.node.nodes import merge_nodes

AGREE = Comparison(agree=True)
NAN = float("nan")


def rank_step(
    rank: int,
    share: Share,
    bits: float = NAN,
    *,
    varied: float = NAN,
    few: float = NAN,
    looked_at: float = 4.0,
    **row: float,
) -> RankStep:
    """Return a rank's step: bits of its weights, if they were looked at, and its gradients.

    few: bits of a few of its weights. looked_at: the number of weights.
    """
    families = family_columns((GRADIENTS, WEIGHTS, FEW_WEIGHTS))
    schema = dataclasses.replace(make_schema(share), families=families)
    names = ("skipped", "gradients_reduced", "gradients_measured", "weight_sample", "loss")
    values = {name: row.pop(name) for name in names if name in row}
    gradients = {"elements": 4.0, "abs_max": 9.0, **row}
    record = make_record(1, values, [gradient_row(**gradients)])
    if not isnan(bits):
        weights = np.array([[bits, varied, looked_at]])
        record = dataclasses.replace(record, families={**record.families, WEIGHTS.name: weights})
    if not isnan(few):
        found = {FEW_WEIGHTS.name: np.array([[few, 4.0]])}
        record = dataclasses.replace(record, families={**record.families, **found})
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

    def test_without_a_majority_no_rank_is_named(self, nodes):
        assert compare([4.0, 4.0, 5.0, 5.0], nodes)["gradients"] == Comparison(agree=False)

    def test_with_a_nan_only_the_counts_must_agree(self, nodes):
        assert compare([1.0, 2.0, 3.0, 4.0], nodes, nan_elements=1.0) == {"gradients": AGREE}

    def test_on_a_skipped_step_nothing_is_compared(self, nodes):
        assert compare([1.0, 2.0, 3.0, 4.0], nodes, skipped=1.0) == {}

    def test_negative_zero_is_zero(self, nodes):
        steps = [
            rank_step(r, ddp(r, 4), sum_squares=0.0, abs_max=-0.0 if r else 0.0) for r in range(4)
        ]
        merged = merge_nodes([[steps[rank] for rank in ranks] for ranks in nodes])
        assert merged.replicas == {"gradients": AGREE}


def test_counts_that_differ_along_with_a_nan_are_a_divergence():
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


def test_shards_that_no_other_rank_has_are_not_compared():
    steps = [
        rank_step(
            r, Share(group="fsdp", shard_index=r, shard_count=3), bits=float(r), sum_squares=r
        )
        for r in range(3)
    ]
    assert merge_nodes([steps]).replicas == {}


class TestWeights:
    def test_that_drifted_apart_are_found_though_the_gradients_agree(self):
        steps = [rank_step(r, ddp(r, 3), bits=7.0 + (r == 2)) for r in range(3)]
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

        steps = [rank_step(r, share(r), bits=float(r % 2)) for r in range(4)]
        assert merge_nodes([steps]).replicas["weights"] == AGREE

    def test_of_plain_parameters_are_compared_once_they_are_known_to_be_copies(self):
        share = plain("weight")
        assumed = AssumedShares()

        def seen(norms: list[float], bits: list[float]):
            steps = [
                rank_step(r, share, bits=b, sum_squares=n)
                for r, (n, b) in enumerate(zip(norms, bits, strict=True))
            ]
            return merge_nodes([steps], assumed=assumed).replicas

        assert seen([1.0] * 3, [7.0] * 3) == {"weights": AGREE}
        assert seen([2.0] * 3, [8.0, 8.0, 9.0]) == {
            "weights": Comparison(agree=False, minority_ranks=(2,), tensors=("weight",))
        }

    def test_of_independent_models_are_never_compared(self):
        share = plain("weight")
        steps = [rank_step(r, share, bits=float(r), sum_squares=1.0 + r) for r in range(3)]
        assert merge_nodes([steps]).replicas == {}


class TestFewWeights:
    def seen(self, few: list[float], bits: list[float], share=None, assumed=None, **row: float):
        steps = [
            rank_step(r, share or ddp(r, 3), b, few=f, **{"sum_squares": 1.0, **row})
            for r, (f, b) in enumerate(zip(few, bits, strict=True))
        ]
        found = merge_nodes([steps[:1], steps[1:]], assumed=assumed or AssumedShares())
        return found.replicas.get("weights")

    def test_that_differ_show_that_replicas_part(self):
        found = self.seen([7.0, 8.0, 7.0], [NAN] * 3)
        assert found == Comparison(agree=False, minority_ranks=(1,))

    def test_that_are_equal_say_nothing_of_the_others(self):
        assert self.seen([7.0] * 3, [NAN] * 3) is None

    def test_count_less_than_all_weights_where_those_were_looked_at(self):
        assert self.seen([7.0, 8.0, 7.0], [1.0] * 3) == AGREE

    def test_of_other_shards_are_not_compared(self):
        steps = [
            rank_step(r, Share(group="fsdp", shard_index=r, shard_count=3), few=float(r))
            for r in range(3)
        ]
        assert merge_nodes([steps]).replicas == {}

    def test_of_plain_parameters_count_once_those_are_known_to_be_copies(self):
        share, assumed = plain("weight"), AssumedShares()
        steps = [rank_step(r, share, few=7.0 + r, sum_squares=1.0 + r) for r in range(3)]
        assert merge_nodes([steps], assumed=assumed).replicas == {}
        assert self.seen([NAN] * 3, [7.0] * 3, share, assumed) == AGREE
        found = self.seen([7.0, 8.0, 7.0], [NAN] * 3, share, assumed)
        assert found == Comparison(agree=False, minority_ranks=(1,), tensors=("weight",))

    def test_show_no_copies_by_themselves(self):
        assumed = AssumedShares()
        for few in (7.0, 8.0):
            steps = [rank_step(r, plain("weight"), few=few, sum_squares=1.0 + r) for r in range(2)]
            merge_nodes([steps], assumed=assumed)
        assert assumed.copies.get("unwrapped 1234 weight", []) == []

    def test_of_replicas_that_step_with_their_own_gradients_are_not_compared(self):
        steps = [
            rank_step(r, ddp(r, 3), few=float(r), sum_squares=4.0 + r, gradients_reduced=0.0)
            for r in range(3)
        ]
        assert merge_nodes([steps]).replicas == {}


def plain(name: str) -> Share:
    return Share(group=f"unwrapped 1234 {name}", assumed=True)


class TestEvidence:
    """What shows that ranks hold copies of a tensor that no wrapper explains."""

    def learned(self, *steps: list[RankStep]) -> list[list[int]]:
        assumed = AssumedShares()
        for step in steps:
            merge_nodes([step[:1], step[1:]], assumed=assumed)
        return assumed.copies.get("unwrapped 1234 weight", [])

    def ranks(self, bits: list[float], norms: list[float], **values: float) -> list[RankStep]:
        return [
            rank_step(r, plain("weight"), bits=b, sum_squares=n, **values)
            for r, (b, n) in enumerate(zip(bits, norms, strict=True))
        ]

    def test_equal_weights_at_first_that_are_not_constant(self):
        assert self.learned(self.ranks([7.0, 7.0, 8.0], [1.0, 2.0, 3.0], varied=1.0)) == [[0, 1]]

    @pytest.mark.parametrize("varied", [0.0, NAN])
    def test_not_equal_weights_that_are_constant_or_of_experts(self, varied):
        assert self.learned(self.ranks([7.0, 7.0], [1.0, 2.0], varied=varied)) == []

    def test_not_equal_weights_of_stages_of_which_one_alone_has_the_loss(self):
        steps = self.ranks([7.0, 7.0], [1.0, 2.0], varied=1.0)
        last = rank_step(1, plain("weight"), bits=7.0, varied=1.0, sum_squares=2.0, loss=1.0)
        assert self.learned([steps[0], last]) == []

    def test_weights_that_are_still_equal_after_an_update(self):
        first = self.ranks([7.0, 7.0], [1.0, 2.0], varied=0.0, looked_at=1024.0)
        after = self.ranks([8.0, 8.0], [1.0, 2.0], varied=0.0, looked_at=1024.0)
        assert self.learned(first, after) == [[0, 1]]
        assert self.learned(first, first) == [], "nothing was updated"

    @pytest.mark.parametrize("varied", [0.0, 1.0])
    def test_few_weights_may_be_equal_after_an_update_by_signs_alone(self, varied):
        first = self.ranks([7.0, 7.0], [1.0, 2.0], varied=0.0)
        assert self.learned(first, self.ranks([8.0, 8.0], [1.0, 2.0], varied=varied)) == []
        assert self.learned(first, self.ranks([8.0, 8.0], [3.0, 3.0], varied=varied)) == [[0, 1]]

    @pytest.mark.parametrize(
        ("equal", "parted", "reduced"),
        [(4.0, 4096.0, False), (4096.0, 4.0, True), (4.0, None, False), (4096.0, None, True)],
    )
    def test_an_update_that_leaves_few_weights_equal_was_not_reduced(self, equal, parted, reduced):
        assumed = AssumedShares()
        sizes = {"bias": equal} | ({} if parted is None else {"weight": parted})
        schema = dataclasses.replace(
            make_schema(*map(plain, sizes)), families=family_columns((GRADIENTS, WEIGHTS))
        )
        for update in range(2):
            steps = []
            for rank in range(2):
                rows = [gradient_row(elements=4.0, abs_max=9.0, sum_squares=1.0 + rank)]
                held = [[1.0 + update, 1.0, equal], [5.0 + update * (1 + rank), 1.0, parted]]
                record = make_record(1, {}, rows * len(sizes))
                families = {**record.families, WEIGHTS.name: np.array(held[: len(sizes)])}
                steps.append(RankStep(rank, schema, dataclasses.replace(record, families=families)))
            merged = merge_nodes([steps], assumed=assumed)
        assert merged.reduction is not None and merged.reduction.reduced == reduced
        assert set(map(str, assumed.copies.values())) == {"[[0, 1]]"}

    def test_equal_gradients_but_of_equal_weights_alone(self):
        assert self.learned(self.ranks([7.0, 7.0], [1.0, 1.0])) == [[0, 1]]
        assert self.learned(self.ranks([7.0, 8.0], [1.0, 1.0])) == []

    def test_constant_weights_are_copies_where_all_others_are(self):
        assumed = AssumedShares()
        shares = (plain("weight"), plain("norm"))
        schema = dataclasses.replace(
            make_schema(*shares), families=family_columns((GRADIENTS, WEIGHTS))
        )
        steps = []
        for rank in range(2):
            rows = [gradient_row(elements=4.0, abs_max=9.0, sum_squares=1.0 + rank)] * 2
            record = make_record(1, {}, rows)
            weights = np.array([[7.0, 1.0, 4.0], [3.0, 0.0, 4.0]])
            families = {**record.families, WEIGHTS.name: weights}
            steps.append(RankStep(rank, schema, dataclasses.replace(record, families=families)))
        assert merge_nodes([steps], assumed=assumed).get("sum_squares") == 2.0
        assert set(map(str, assumed.copies.values())) == {"[[0, 1]]"}


def of_home(rank: int, tensor: str = "weight") -> Share:
    """Ranks 0 and 1 are one wrapper's, 2 and 3 another's."""
    home = "0-1" if rank < 2 else "2-3"
    return Share(
        group=f"replicate over 2 of ranks {home} {tensor}",
        replica_index=rank % 2,
        replica_count=2,
        home=home,
    )


class TestEvidenceOfHomes:
    """What shows that two wrappers, each over part of the ranks, hold copies of a tensor."""

    def merged(self, *steps: dict[str, list[float]], **values: float) -> list[MergedStep]:
        assumed = AssumedShares()
        found = []
        for step in steps:
            ranks = [
                rank_step(
                    rank,
                    of_home(rank),
                    **{name: own[rank // 2] for name, own in step.items()},
                    **values,
                )
                for rank in range(4)
            ]
            found.append(merge_nodes([ranks[:1], ranks[1:]], assumed=assumed))
        return found

    def norm(self, *steps: dict[str, list[float]], **values: float) -> float | None:
        last = self.merged(*steps, **values)[-1]
        assert bool(last.undecided) != last.gradients_judged
        return last.gradients["sum_squares"] if last.gradients_judged else None

    def test_equal_gradients_count_once(self):
        assert self.norm({"sum_squares": [3.0, 3.0]}) == 3.0
        assert self.norm({"sum_squares": [3.0, 3.0], "bits": [7.0, 7.0]}) == 3.0

    def test_what_was_equal_once_counts_once_for_good(self):
        assert self.norm({"sum_squares": [3.0, 3.0]}, {"sum_squares": [4.0, 5.0]}) == 4.0

    def test_parts_add_up(self):
        assert self.norm({"sum_squares": [3.0, 4.0], "bits": [7.0, 8.0]}) == 7.0
        assert self.norm({"sum_squares": [3.0, 3.0], "bits": [7.0, 8.0]}) == 6.0

    def test_gradients_of_one_magnitude_wait_for_weights_after_an_update(self):
        first = {"sum_squares": [3.0, 3.0], "abs_max": [3.0**0.5] * 2, "bits": [7.0, 7.0]}
        (undecided,) = self.merged(first, elements=1.0)
        assert undecided.undecided == ("weight",)
        assert not undecided.gradients_judged
        assert self.norm(first, {**first, "bits": [8.0, 8.0]}, elements=1.0) == 3.0

    def test_gradients_that_are_all_zero_keep_no_norm_back(self):
        assert self.norm({"sum_squares": [0.0, 0.0], "abs_max": [0.0, 0.0]}) == 0.0

    def test_equal_weights_with_different_gradients_are_one_model_or_two(self):
        first = {"sum_squares": [3.0, 4.0], "bits": [7.0, 7.0]}
        apart = {"sum_squares": [4.0, 5.0], "bits": [8.0, 9.0]}
        assert self.norm(first) is None
        assert self.norm(first, apart) is None
        averaged = {"sum_squares": [4.0, 5.0], "bits": [10.0, 10.0], "looked_at": [4096.0] * 2}
        assert self.norm(first, apart, averaged) == 4.0

    @pytest.mark.parametrize("share", [plain, lambda name: None])
    def test_copies_of_blocks_do_not_show_where_one_is_frozen_on_some_ranks(self, share):
        def step(looked_at: float) -> MergedStep:
            steps = [
                rank_step(
                    rank,
                    share("blocks.*.norm") or of_home(rank, "blocks.*.norm"),
                    sum_squares=3.0 + rank // 2,
                    bits=7.0 + rank // 2,
                    looked_at=looked_at if rank < 2 else 8.0,
                )
                for rank in range(4)
            ]
            return merge_nodes([steps])

        assert step(8.0).gradients_judged
        assert step(4.0).undecided == ("blocks.*.norm",)
        assert not step(4.0).gradients_judged

    def test_weights_of_stages_of_which_one_alone_has_the_loss_may_begin_alike(self):
        ranks = [
            rank_step(
                rank,
                of_home(rank),
                sum_squares=3.0 + rank // 2,
                bits=7.0,
                **({"loss": 1.0} if rank > 1 else {}),
            )
            for rank in range(4)
        ]
        assert merge_nodes([ranks]).get("sum_squares") == 7.0
        assert merge_nodes([ranks]).gradients_judged


def state_table(rank: int, *columns: tuple[str, float, float, float]) -> RankLayers:
    """Return a rank's table of name, bits, varied and copied of each tensor."""
    share = Share(group=STATE.name, shard_index=rank, shard_count=3, family=STATE.name)
    schema = dataclasses.replace(
        make_schema(share, layers=tuple(name for name, *_ in columns)),
        families=family_columns((GRADIENTS, STATE)),
    )
    rows = np.array([numbers for _, *numbers in columns])
    return RankLayers(rank, schema, {STATE.name: rows})


class TestState:
    """Frozen parameters and buffers."""

    def compared(self, assumed: AssumedShares, **bits: list[float]):
        kinds = {"codes": (1.0, 0.0), "zeros": (0.0, 0.0), "mean": (1.0, -1.0), "known": (0.0, 1.0)}
        steps = [rank_step(r, ddp(r, 3), sum_squares=1.0) for r in range(3)]
        layers = [
            state_table(r, *((name, own[r], *kinds[name]) for name, own in bits.items()))
            for r in range(3)
        ]
        return merge_nodes([steps], assumed=assumed, layers=layers).replicas["state"]

    def test_that_was_equal_and_parts_is_named(self):
        assumed = AssumedShares()
        assert self.compared(assumed, codes=[1.0] * 3, zeros=[2.0] * 3).agree
        found = self.compared(assumed, codes=[1.0, 4.0, 1.0], zeros=[2.0] * 3)
        assert found == Comparison(agree=False, minority_ranks=(1,), tensors=("codes",))

    def test_that_a_wrapper_copied_needs_no_evidence(self):
        found = self.compared(AssumedShares(), known=[1.0, 1.0, 4.0])
        assert found == Comparison(agree=False, minority_ranks=(2,), tensors=("known",))

    def test_that_is_local_by_design_is_no_divergence(self):
        found = self.compared(AssumedShares(), mean=[1.0, 2.0, 3.0])
        assert found == Comparison(agree=True, local=("mean",))

    def test_that_was_never_equal_is_no_divergence_but_named(self):
        found = self.compared(AssumedShares(), codes=[1.0, 2.0, 3.0])
        assert found == Comparison(agree=True, unjudged=("codes",))


def local_steps(bits: list[float], norms: list[float], *, reduced: list[float], **row: float):
    """Ranks of DDP of which some say whether their gradients were reduced."""
    steps = [
        rank_step(r, ddp(r, len(norms)), b, sum_squares=n, gradients_reduced=reduced[r], **row)
        for r, (b, n) in enumerate(zip(bits, norms, strict=True))
    ]
    return merge_nodes([steps[:1], steps[1:]], assumed=AssumedShares())


class TestReplicasThatStepWithTheirOwnGradients:
    def test_are_not_said_to_diverge(self):
        bits, norms = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
        steps = [
            rank_step(r, ddp(r, 3), b, sum_squares=n, gradients_reduced=0.0, weight_sample=b)
            for r, (b, n) in enumerate(zip(bits, norms, strict=True))
        ]
        merged = merge_nodes([steps], assumed=AssumedShares())
        assert merged.replicas == {}
        assert merged.reduction is not None and merged.reduction.apart
        assert merged.reduction.withheld == {"gradients", "weights"}

    @pytest.mark.parametrize("samples", [[3.0, 3.0], [3.0, 4.0]])
    def test_are_known_by_their_weights_where_gradients_are_left_out(self, samples):
        nothing = dict.fromkeys(GRADIENTS.names, NAN)
        steps = [
            rank_step(r, plain("w"), gradients_measured=0.0, weight_sample=sample, **nothing)
            for r, sample in enumerate(samples)
        ]
        found = merge_nodes([steps], assumed=AssumedShares()).reduction
        assert found is not None and not found.measured
        assert found.equal_before is (samples[0] == samples[1])
        assert not found.apart and not found.parts

    def test_weights_that_were_not_looked_at_show_nothing(self):
        merged = local_steps([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], reduced=[0.0] * 3)
        assert merged.replicas == {}
        assert not merged.reduction.apart

    @pytest.mark.parametrize("moved", [True, False])
    def test_that_are_equal_after_an_update_are_kept_equal_by_something_else(self, moved):
        assumed = AssumedShares()
        for bits in (1.0, 2.0 if moved else 1.0):
            steps = [
                rank_step(r, ddp(r, 2), bits, sum_squares=4.0 + r, gradients_reduced=1.0)
                for r in range(2)
            ]
            merged = merge_nodes([steps], assumed=assumed)
        assert merged.replicas == {"weights": AGREE}
        assert merged.reduction is not None
        assert merged.reduction.contradicted is not moved
        assert merged.reduction.reduced is moved

    def test_are_found_equal_once_they_have_synchronised(self):
        merged = local_steps([1.0] * 3, [4.0, 5.0, 6.0], reduced=[0.0] * 3, weight_sample=3.0)
        assert merged.replicas == {"weights": AGREE}
        assert not merged.reduction.apart

    def test_one_rank_that_did_not_reduce_is_enough(self):
        merged = local_steps([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], reduced=[1.0, 0.0, 1.0])
        assert merged.replicas == {}

    def test_equal_gradients_show_that_they_were_reduced_after_all(self):
        replicas = local_steps([1.0, 2.0, 1.0], [4.0] * 3, reduced=[0.0] * 3).replicas
        assert replicas["gradients"] == AGREE
        assert not replicas["weights"].agree
        assert replicas["weights"].minority_ranks == (1,)

    @pytest.mark.parametrize("row", [{"nan_elements": 4.0}, {}])
    def test_gradients_without_a_number_in_them_show_nothing(self, row):
        replicas = local_steps([1.0, 2.0, 1.0], [0.0] * 3, reduced=[0.0] * 3, **row).replicas
        assert "weights" not in replicas

    def test_the_same_differences_after_a_reduction_are_a_divergence(self):
        replicas = local_steps([1.0, 2.0, 1.0], [4.0, 5.0, 4.0], reduced=[1.0] * 3).replicas
        assert not replicas["gradients"].agree
        assert not replicas["weights"].agree

    def test_that_a_wrapper_says_are_reduced_but_differ_on_all_ranks_never_were(self):
        merged = local_steps([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], reduced=[1.0] * 3)
        assert merged.replicas == {}
        assert merged.reduction.contradicted
        assert not merged.reduction.reduced

    def test_once_reduced_a_difference_on_all_ranks_is_a_divergence_first(self):
        assumed = AssumedShares()
        for norms in ([4.0, 4.0], [4.0, 5.0]):
            steps = [
                rank_step(r, ddp(r, 2), sum_squares=n, gradients_reduced=1.0)
                for r, n in enumerate(norms)
            ]
            merged = merge_nodes([steps], assumed=assumed)
        assert merged.replicas == {"gradients": Comparison(agree=False)}
        assert merged.reduction is not None and merged.reduction.contradicted

    def test_plain_copies_may_drift_while_their_gradients_differ(self):
        def merged(norms: list[float], bits: list[float]):
            steps = [
                rank_step(r, plain("weight"), bits=b, sum_squares=n)
                for r, (n, b) in enumerate(zip(norms, bits, strict=True))
            ]
            return merge_nodes([steps], assumed=assumed).replicas

        assumed = AssumedShares()
        merged([1.0] * 3, [7.0] * 3)
        assert merged([1.0, 2.0, 3.0], [7.0, 8.0, 9.0]) == {}
        assert merged([1.0] * 3, [7.0] * 3) == {"weights": AGREE}
        assert merged([1.0] * 3, [7.0, 7.0, 8.0])["weights"].minority_ranks == (2,)

    def test_plain_copies_that_part_while_others_are_reduced_are_named_alone(self):
        assumed = AssumedShares({plain(name).group: [[0, 1]] for name in ("router", "weight")})
        shares = (plain("weight"), plain("router"))
        schema = dataclasses.replace(
            make_schema(*shares), families=family_columns((GRADIENTS, WEIGHTS))
        )
        steps = []
        for rank in range(2):
            own = gradient_row(elements=4.0, abs_max=9.0, sum_squares=1.0 + rank)
            rows = [gradient_row(elements=4.0, abs_max=9.0, sum_squares=5.0), own]
            record = make_record(1, {}, rows)
            weights = np.array([[7.0, 1.0, 4.0], [3.0 + rank, 1.0, 4.0]])
            families = {**record.families, WEIGHTS.name: weights}
            steps.append(RankStep(rank, schema, dataclasses.replace(record, families=families)))
        merged = merge_nodes([steps], assumed=assumed)
        assert merged.replicas["weights"] == Comparison(agree=False, tensors=("router",))
        assert merged.get("sum_squares") == 6.0

    @pytest.mark.parametrize(("squares", "apart"), [(1.0, True), (0.0, False)])
    def test_slices_that_nothing_reduced_are_no_averaging_to_come(self, squares, apart):
        steps = []
        for rank in range(2):
            shard = Share(group="zero1", shard_index=rank, shard_count=2)
            row = gradient_row(elements=4.0, abs_max=9.0 * squares, sum_squares=squares)
            record = make_record(1, {"gradients_reduced": 0.0}, [row])
            steps.append(RankStep(rank, make_schema(shard), record))
        reduction = merge_nodes([steps], assumed=AssumedShares({})).reduction
        assert reduction is not None
        assert (reduction.apart, reduction.wrapped) == (apart, True)

    def test_plain_copies_next_to_shards_part_alone_though_the_wrapper_reduced(self):
        steps = []
        for rank in range(2):
            shard = Share(group="fsdp2", shard_index=rank, shard_count=2)
            schema = dataclasses.replace(
                make_schema(shard, plain("head")), families=family_columns((GRADIENTS, WEIGHTS))
            )
            rows = [gradient_row(elements=4.0, abs_max=9.0, sum_squares=n + rank) for n in (1, 5)]
            record = make_record(1, {"gradients_reduced": 1.0}, rows)
            weights = np.array([[7.0 + rank, 1.0, 4.0], [3.0 + rank, 1.0, 4.0]])
            families = {**record.families, WEIGHTS.name: weights}
            steps.append(RankStep(rank, schema, dataclasses.replace(record, families=families)))
        merged = merge_nodes([steps], assumed=AssumedShares({plain("head").group: [[0, 1]]}))
        assert merged.replicas["weights"] == Comparison(agree=False, tensors=("head",))
        assert merged.reduction is not None and not merged.reduction.contradicted
