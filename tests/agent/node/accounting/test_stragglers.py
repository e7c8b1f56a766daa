import numpy as np
import pytest

from mp_agent.node.accounting.ranks import (
    BLOCK_STEPS,
    BLOCKS,
    StragglerTracker,
    laggards,
    slowest,
    stalled,
)
from mp_agent.records.health import Straggler
from mp_agent.records.node_report import RankStatus
from mp_agent.records.steps import EndReason, Phase


def watch(*rows: dict[int, float]) -> Straggler | None:
    stragglers = StragglerTracker()
    for row in rows:
        stragglers.fold(row)
    return stragglers.worst


def test_the_slowest_rank_is_named_with_what_it_costs():
    generator = np.random.default_rng(1)
    table = generator.uniform(0.9, 1.1, size=(BLOCK_STEPS, 5))
    table[:, 3] *= 1.7
    medians = np.median(table, axis=0)
    found = watch(*(dict(enumerate(row)) for row in table.tolist()))

    assert found is not None
    assert found.rank == 3
    assert found.slowdown == pytest.approx(medians[3] / np.median(medians))
    assert found.delay_seconds == pytest.approx(medians[3] - np.median(medians))


def test_of_two_ranks_the_faster_one_is_the_measure():
    found = slowest(np.array([4, 7]), [np.array([1.0, 1.5])])
    assert found == Straggler(rank=7, slowdown=1.5, delay_seconds=0.5)


def test_a_hiccup_of_some_steps_makes_no_rank_a_straggler():
    rows = [{0: 1.0, 1: 1.0, 2: 1.0} for _ in range(BLOCK_STEPS)]
    for step in range(BLOCK_STEPS // 2 - 1):
        rows[step] = {0: 60.0, 1: 1.0, 2: 1.0}
    found = watch(*rows)

    assert found is not None
    assert found.slowdown == 1.0


def test_a_different_slow_rank_on_every_step_is_no_straggler():
    rows = [{rank: 3.0 if step % 8 == rank else 1.0 for rank in range(8)} for step in range(32)]
    found = watch(*rows)

    assert found is not None
    assert found.slowdown == 1.0


def test_another_slow_rank_in_every_block_is_no_straggler():
    """Of many ranks whose work varies, some rank is slow in any block."""
    blocks = [[{rank: 3.0 if rank == slow else 1.0 for rank in range(4)}] * BLOCK_STEPS
              for slow in (0, 1, 0, 1)]  # fmt: skip
    found = watch(*(row for block in blocks for row in block))

    assert found is not None
    assert found.slowdown == 1.0


def test_a_slow_node_has_a_straggler_whichever_of_its_ranks_is_the_slowest():
    rows = [{0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0 + slow, 4: 2.1 - slow} for slow in (0.0, 0.2, 0.0, 0.2)]
    found = watch(*(row for row in rows for _ in range(BLOCK_STEPS)))

    assert found is not None
    assert (found.rank, found.slowdown, found.delay_seconds) == (3, 2.0, 1.0)


def test_who_is_slow_no_more_is_no_straggler_after_a_block():
    slow, fast = {0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.0}
    found = watch(*[slow] * (BLOCKS * BLOCK_STEPS), *[fast] * BLOCK_STEPS)

    assert found is not None
    assert found.slowdown == 1.0


def test_nothing_is_said_before_a_block_is_whole_nor_of_a_lone_rank():
    assert watch(*[{0: 1.0, 1: 9.0}] * (BLOCK_STEPS - 1)) is None
    assert watch(*[{0: 1.0}] * 100) is None
    assert watch(*[{}] * 100) is None


def test_with_a_rank_that_goes_a_new_block_begins():
    three, two = {0: 1.0, 1: 1.0, 2: 9.0}, {0: 1.0, 1: 2.0}

    assert watch(*[three] * (BLOCK_STEPS - 1), *[two] * (BLOCK_STEPS - 1)) is None
    found = watch(*[three] * (BLOCK_STEPS - 1), *[two] * BLOCK_STEPS)
    assert found is not None
    assert found.rank == 1


def test_ranks_that_take_no_time_at_all_have_no_ratio():
    assert slowest(np.array([0, 1]), [np.array([0.0, 0.0])]) is None
    assert (
        slowest(np.array([0, 1, 2]), [np.array([1.0, 1.0, 5.0]), np.array([0.0, 0.0, 5.0])]) is None
    )


def test_what_was_found_outlives_a_restart():
    straggler = Straggler(rank=3, slowdown=1.6, delay_seconds=0.2)
    again = StragglerTracker(worst=straggler)
    again.fold({0: 1.0, 1: 1.0})

    assert again.worst == straggler


def status(
    rank: int, phase: Phase, started: int = 11, end: EndReason = EndReason.RUNNING
) -> RankStatus:
    return RankStatus(
        rank=rank,
        phase=phase,
        phase_name=phase.name.lower(),
        started_sequence=started,
        committed_sequence=started - 1,
        end=end,
    )


def named(*ranks: RankStatus, usual=1.0, standing=60.0) -> list[tuple[int, str]]:
    found = laggards(ranks) if stalled(standing, usual) else ()
    return [(laggard.rank, laggard.phase) for laggard in found]


def test_ranks_that_are_behind_are_named_with_where_they_stand():
    ranks = (
        status(0, Phase.BACKWARD),
        status(1, Phase.FORWARD),
        status(2, Phase.BACKWARD),
        status(3, Phase.OPTIMIZER, started=10),
    )

    assert named(*ranks) == [(1, "forward"), (3, "optimizer")]


def test_ranks_that_all_hang_at_the_same_place_name_no_rank():
    assert named(status(0, Phase.BACKWARD), status(1, Phase.BACKWARD)) == []


@pytest.mark.parametrize("end", [EndReason.KILLED, EndReason.FAILED, EndReason.UNKNOWN])
def test_a_rank_that_is_gone_lags_wherever_it_was(end):
    ranks = (status(0, Phase.BACKWARD), status(1, Phase.OPTIMIZER, end=end))

    assert named(*ranks) == [(1, "gone")]


def test_a_rank_that_completed_does_not():
    ranks = (status(0, Phase.BACKWARD), status(1, Phase.ENDED, end=EndReason.COMPLETED))

    assert named(*ranks) == []


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER])
def test_while_one_rank_does_something_else_the_others_rightly_wait(phase):
    assert named(status(0, phase), status(1, Phase.FORWARD), status(2, Phase.BACKWARD)) == []


@pytest.mark.parametrize(
    ("usual", "seconds", "lag"), [(1.0, 29.0, 0), (1.0, 30.0, 1), (20.0, 59.0, 0), (20.0, 60.0, 1)]
)
def test_no_rank_lags_while_steps_are_made_at_their_usual_pace(usual, seconds, lag):
    ranks = (status(0, Phase.BACKWARD), status(1, Phase.FORWARD))

    assert len(named(*ranks, usual=usual, standing=seconds)) == lag


def test_in_the_first_step_ranks_can_lag_as_well():
    ranks = (status(0, Phase.BACKWARD, 1), status(1, Phase.FORWARD, 1))

    assert named(*ranks, standing=None, usual=None) == [(1, "forward")]


def test_a_run_that_is_over_has_no_laggards():
    assert named(status(0, Phase.ENDED, end=EndReason.KILLED)) == []
    assert named() == []
