import math
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.node.merge.coverage import AssumedShares
from mp_agent.node.merge.node_steps import RankStep
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import Share
from tests.agent.gradient_reference import reference_row
from tests.agent.node.builders import (
    gradient_row,
    guarded_step,
    make_record,
    rank_step,
    step_with_local_gradients,
)
from tests.agent.node.nodes import merge_nodes
from tests.subtests import each

NAN = float("nan")
UNMEASURED = np.full(len(GRADIENT_COLUMN_NAMES), NAN)


def merge(steps: list[RankStep], world_size: int | None = None) -> MergedStep:
    return merge_nodes([steps], world_size)


def merge_in(
    assumed: AssumedShares, steps: list[RankStep], world_size: int | None = None
) -> MergedStep:
    return merge_nodes([steps], world_size, assumed=assumed)


@pytest.mark.slow
@given(
    elements=st.lists(st.floats(width=32), min_size=8, max_size=40),
    shard_count=st.integers(1, 4),
    replica_count=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_any_layout_of_shards_and_replicas_merges_to_the_whole_tensor(
    elements, shard_count, replica_count, order
):
    whole = np.array(elements)
    steps = []
    for shard, part in enumerate(np.array_split(whole, shard_count)):
        for replica in range(replica_count):
            share = Share(
                group="g",
                shard_index=shard,
                shard_count=shard_count,
                replica_index=replica,
                replica_count=replica_count,
            )
            rank = shard * replica_count + replica
            steps.append(rank_step(rank, make_record(gradients=[reference_row(part)]), share))
    order.shuffle(steps)

    merged = merge(steps)

    expected = dict(zip(steps[0].schema.columns("gradients"), reference_row(whole), strict=True))
    found = {name: merged.gradients.get(name, NAN) for name in expected}
    assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert merged.gradients_complete
    assert merged.coverage == 1.0


def test_tensors_of_two_groups_add_up_and_shared_ones_count_once():
    experts = [Share(group=f"expert{rank}") for rank in range(2)]
    dense = [Share(group="dense", replica_index=rank, replica_count=2) for rank in range(2)]
    rows = [[gradient_row(sum_squares=9.0), gradient_row(sum_squares=r + 1.0)] for r in range(2)]

    merged = merge(
        [rank_step(r, make_record(gradients=rows[r]), dense[r], experts[r]) for r in range(2)]
    )

    assert merged.get("sum_squares") == 9.0 + 1.0 + 2.0


def test_a_missing_replica_costs_coverage_but_not_the_norm():
    share = Share(group="ddp", replica_index=1, replica_count=3)
    merged = merge([rank_step(1, make_record(), share)], world_size=3)

    assert merged.gradients_complete
    assert merged.coverage == pytest.approx(1 / 3)
    assert merged.missing_ranks == (0, 2)


def test_a_missing_shard_makes_the_norm_partial():
    share = Share(group="fsdp", shard_index=1, shard_count=2)
    merged = merge([rank_step(1, make_record(), share)], world_size=2)

    assert not merged.gradients_complete
    assert not merged.gradients_judged


def test_ranks_unknown_here_may_hold_other_stages_so_the_norm_is_partial():
    stage = Share(group="stage0", replica_count=2)
    merged = merge([rank_step(r, make_record(), stage) for r in range(2)], world_size=4)

    assert not merged.gradients_complete


def test_a_shard_of_a_known_rank_that_is_absent_is_missed():
    shares = [Share(group="stage0"), Share(group="stage1")]
    present = rank_step(0, make_record(), shares[0])
    absent = rank_step(1, make_record(), shares[1])

    merged = merge_nodes([[present]], 2, absent=[absent])

    assert not merged.gradients_complete


def test_a_replica_that_did_not_measure_gives_way_to_one_that_did():
    shares = [Share(group="ddp", replica_index=r, replica_count=2) for r in range(2)]
    unmeasured = make_record(gradients=[UNMEASURED])
    merged = merge([rank_step(0, unmeasured, shares[0]), rank_step(1, make_record(), shares[1])])

    assert merged.get("sum_squares") == 1.0


def test_unmeasured_gradients_are_absent_rather_than_zero():
    merged = merge([rank_step(0, make_record(gradients=[UNMEASURED]))])

    assert merged.grad_norm is None
    assert not merged.gradients_complete


def test_step_columns_follow_their_algebra():
    rows = [
        {"loss": 1.0, "skipped": 0.0, "tokens": 10.0, "step_seconds": 0.5, "compute_seconds": 1.0},
        {"loss": 4.0, "skipped": 1.0, "tokens": 5.0, "step_seconds": 0.7},
        {"loss_nonfinite": 1.0, "skipped": 0.0},
    ]
    shares = [Share(group="ddp", replica_index=r, replica_count=3) for r in range(3)]
    merged = merge([rank_step(r, make_record(values=rows[r]), shares[r]) for r in range(3)])

    assert merged.get("loss") == 2.5, "the mean is over the ranks that observed one"
    assert merged.skipped
    assert merged.get("tokens") == 15.0
    assert merged.get("step_seconds") == 0.7
    assert merged.get("learning_rate") is None
    assert merged.get("compute_seconds") is None, "a rank's own column is never merged"
    assert merged.nonfinite_loss_ranks == (2,)


@each("nodes", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [0, 2], [1]]])
@each(
    ("backwards", "named"),
    [
        ((nan, nan, nan, nan), ()),
        ((nan, 1.0, nan, nan), (1,)),
        # Ranks that reduce after every backward add the next one to what they have reduced.
        ((2.0, 2.0, 1.0, 2.0), (2,)),
        ((2.0, 1.0, 2.0, 1.0), (1, 3)),
        ((3.0, 3.0, 3.0, 3.0), (0, 1, 2, 3)),
    ],
)
def test_ranks_are_named_whose_own_gradients_were_not_finite_first(backwards, named, nodes):
    shares = [Share(group="ddp", replica_index=r, replica_count=4) for r in range(4)]
    plain = [rank_step(r, make_record(), shares[r]) for r in range(4)]
    ranks = [
        step_with_local_gradients(step, local_grad_norm=1.0, local_grad_nonfinite_backward=own)
        for step, own in zip(plain, backwards, strict=True)
    ]
    merged = merge_nodes([[ranks[rank] for rank in node] for node in nodes], 4)

    assert merged.nonfinite_gradient_ranks == named
    assert merged.get("local_grad_norm") is None, "a rank's own column is never merged"
    without = [ranks[rank] if rank != 1 else plain[rank] for rank in range(4)]
    assert 1 not in merge_nodes([without], 4).nonfinite_gradient_ranks


def test_no_merged_value_is_nan_or_infinite():
    values = {"loss": float("inf"), "loss_scale": 2.0}
    rows = [gradient_row(sum_squares=1e308), gradient_row(sum_squares=1e308)]
    merged = merge([rank_step(0, make_record(values=values, gradients=rows), *two_groups())])

    assert all(map(math.isfinite, (*merged.columns.values(), *merged.gradients.values())))
    assert merged.grad_norm is None


def two_groups() -> tuple[Share, Share]:
    return Share(group="a"), Share(group="b")


def test_time_is_when_the_last_rank_was_done():
    shares = [Share(group="ddp", replica_index=r, replica_count=2) for r in range(2)]
    times = (11.5, 10.0)
    merged = merge(
        [rank_step(r, make_record(time_unix_seconds=times[r]), shares[r]) for r in range(2)]
    )

    assert merged.time_unix_seconds == 11.5


def test_the_trainers_step_is_taken_from_whichever_rank_was_given_it():
    shares = [Share(group="ddp", replica_index=r, replica_count=2) for r in range(2)]
    records = [make_record(7), make_record(7, step=5007)]
    merged = merge([rank_step(r, records[r], shares[r]) for r in range(2)])

    assert (merged.sequence, merged.step) == (7, 5007)


class TestAssumedShares:
    def steps(self, *sums: float) -> list[RankStep]:
        return [
            rank_step(
                rank,
                make_record(gradients=[gradient_row(sum_squares=value, abs_max=2.0, elements=4.0)]),
                Share(group="plain", replica_index=rank, replica_count=len(sums), assumed=True),
            )
            for rank, value in enumerate(sums)
        ]

    def test_equal_gradients_make_copies_for_good(self):
        assumed = AssumedShares()
        assert merge_in(assumed, self.steps(4.0, 4.0)).get("sum_squares") == 4.0

        assert merge_in(assumed, self.steps(3.0, 5.0)).get("sum_squares") == 3.0
        assert assumed.copies == {"plain": [[0, 1]]}

    def test_gradients_that_differ_from_the_first_step_on_add_up(self):
        assumed = AssumedShares()
        assert merge_in(assumed, self.steps(4.0, 5.0)).get("sum_squares") == 9.0
        assert assumed.copies == {"plain": []}

    def test_gradients_that_any_model_may_have_show_nothing(self):
        """Such as that of a bias that is added to a mean: the same number everywhere."""
        assumed = AssumedShares()
        assert merge_in(assumed, self.steps(16.0, 16.0)).get("sum_squares") == 16.0
        assert merge_in(assumed, self.steps(4.0, 5.0)).get("sum_squares") == 9.0
        assert merge_in(assumed, self.steps(16.0, 16.0)).get("sum_squares") == 32.0

    def test_of_ranks_that_hold_copies_in_pairs_each_pair_counts_once(self):
        assumed = AssumedShares()
        assert merge_in(assumed, self.steps(4.0, 5.0, 4.0, 5.0)).get("sum_squares") == 9.0
        assert assumed.copies == {"plain": [[0, 2], [1, 3]]}
        assert merge_in(assumed, self.steps(1.0, 2.0, 3.0, 4.0)).get("sum_squares") == 3.0

    def test_independent_models_are_complete_only_with_all_ranks(self):
        assumed = AssumedShares({"plain": []})
        steps = self.steps(4.0, 5.0)

        assert merge_in(assumed, steps).gradients_complete
        assert not merge_in(assumed, steps[:1], world_size=2).gradients_complete

    @pytest.mark.parametrize("copies", [[], [[0, 1]]])
    def test_ranks_without_a_copy_of_anything_train_models_of_their_own(self, copies):
        steps = self.steps(4.0, 5.0)
        assert merge_in(AssumedShares({"plain": copies}), steps).independent is (not copies)

    def test_of_copies_one_of_each_is_enough(self):
        assumed = AssumedShares({"plain": [[0, 2], [1, 3]]})
        steps = self.steps(1.0, 2.0, 1.0, 2.0)

        assert merge_in(assumed, steps[:2], world_size=4).gradients_complete
        assert not merge_in(assumed, steps[::2], world_size=4).gradients_complete

    def test_one_rank_alone_proves_nothing(self):
        assumed = AssumedShares()
        for _ in range(5):
            merge_in(assumed, self.steps(4.0))

        assert assumed.copies == {}


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_the_same_shard_of_the_same_replica_counts_once_whichever_rank_reports_it(nodes):
    shares = [Share(group="g", shard_index=0, shard_count=2) for _ in range(2)]
    steps = [rank_step(r, make_record(), shares[r]) for r in range(2)]
    merged = merge_nodes([[steps[rank] for rank in ranks] for ranks in nodes])

    assert merged.get("sum_squares") == 1.0
    assert not merged.gradients_complete


def test_the_mean_of_losses_is_the_same_but_for_rounding_on_any_nodes():
    shares = [Share(group="ddp", replica_index=r, replica_count=4) for r in range(4)]
    losses = [1e3, 1.0, -7e2, 1e-5]
    steps = [rank_step(r, make_record(values={"loss": losses[r]}), shares[r]) for r in range(4)]
    for nodes in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 3], [1], [2]]):
        merged = merge_nodes([[steps[rank] for rank in ranks] for ranks in nodes])
        assert merged.get("loss") == pytest.approx(math.fsum(losses) / 4, rel=1e-12)


@pytest.mark.parametrize("losses", [(1.7e308, 1.7e308, -1.7e308), (1.7e308, -1.7e308, 1.7e308)])
def test_a_mean_whose_sum_overflows_on_the_way_is_still_there(losses):
    shares = [Share(group="ddp", replica_index=r, replica_count=3) for r in range(3)]
    steps = [rank_step(r, make_record(values={"loss": losses[r]}), shares[r]) for r in range(3)]

    for nodes in ([[0, 1, 2]], [[0, 1], [2]], [[0], [1], [2]]):
        merged = merge_nodes([[steps[rank] for rank in ranks] for ranks in nodes])
        assert merged.get("loss") == pytest.approx(1.7e308 / 3)


def test_a_step_that_any_rank_left_out_has_no_gradients_of_the_others():
    """Their part would look like the whole, or like something that is missing."""
    share = [Share(group="g", shard_index=index, shard_count=2) for index in range(2)]
    row = gradient_row(elements=4.0, sum_squares=1.0, nan_elements=1.0)
    one = make_record(values={"gradients_measured": 1.0, "loss": 2.0}, gradients=[row])
    other = make_record(values={"gradients_measured": 0.0, "loss": 4.0}, gradients=[UNMEASURED])
    merged = merge([rank_step(0, one, share[0]), rank_step(1, other, share[1])])
    assert merged.columns["gradients_measured"] == 0.0
    assert merged.columns["loss"] == 3.0
    assert merged.gradients == {}
    assert not merged.gradients_judged
    assert merged.coverage == 1.0
    both = merge([rank_step(0, one, share[0]), rank_step(1, one, share[1])])
    assert both.gradients["sum_squares"] == 2.0


@pytest.mark.parametrize("together", [True, False], ids=["on one node", "on two nodes"])
@pytest.mark.parametrize("guarded_first", [True, False])
def test_ranks_with_and_without_columns_of_a_guard_merge(together, guarded_first):
    """So it is while agents of two versions run, or where `guard` differs by mistake."""
    plain = rank_step(0, make_record(values={"loss": 1.0, "learning_rate": 0.1}))
    guarded = guarded_step(
        rank_step(1, make_record(values={"loss": 3.0})), guard_skip_update=1.0, guard_none_left=0.0
    )
    ranks = [guarded, plain] if guarded_first else [plain, guarded]

    merged = merge_nodes([ranks] if together else [[rank] for rank in ranks])

    assert merged.columns == {
        "loss": 2.0,
        "learning_rate": 0.1,
        "guard_skip_update": 1.0,
        "guard_none_left": 0.0,
    }
    assert merged.skipped_by_guard
