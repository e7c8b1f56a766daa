import pytest

from mp_agent.node.accounting.stragglers import laggards
from mp_agent.records.rows import RankStatus
from mp_agent.records.steps import EndReason, Phase
from tests.agent.node.builders import merged_step

LAST = merged_step(10, time=1000.0)
LATER = 1000.0 + 60.0


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


def found(*ranks: RankStatus, last=LAST, usual=1.0, now=LATER) -> list[tuple[int, str]]:
    return [(laggard.rank, laggard.phase) for laggard in laggards(ranks, last, usual, now)]


def test_ranks_that_are_behind_are_named_with_where_they_stand():
    ranks = (
        status(0, Phase.BACKWARD),
        status(1, Phase.FORWARD),
        status(2, Phase.BACKWARD),
        status(3, Phase.OPTIMIZER, started=10),
    )

    assert found(*ranks) == [(1, "forward"), (3, "optimizer")]


def test_ranks_that_all_hang_at_the_same_place_name_nobody():
    assert found(status(0, Phase.BACKWARD), status(1, Phase.BACKWARD)) == []


@pytest.mark.parametrize("end", [EndReason.KILLED, EndReason.FAILED, EndReason.UNKNOWN])
def test_a_rank_that_is_gone_lags_wherever_it_was(end):
    ranks = (status(0, Phase.BACKWARD), status(1, Phase.OPTIMIZER, end=end))

    assert found(*ranks) == [(1, "gone")]


def test_a_rank_that_completed_does_not():
    ranks = (status(0, Phase.BACKWARD), status(1, Phase.ENDED, end=EndReason.COMPLETED))

    assert found(*ranks) == []


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER])
def test_while_one_rank_does_something_else_the_others_rightly_wait(phase):
    assert found(status(0, phase), status(1, Phase.FORWARD), status(2, Phase.BACKWARD)) == []


@pytest.mark.parametrize(
    ("usual", "seconds", "lag"), [(1.0, 29.0, 0), (1.0, 30.0, 1), (20.0, 59.0, 0), (20.0, 60.0, 1)]
)
def test_nobody_lags_while_steps_are_made_at_their_usual_pace(usual, seconds, lag):
    ranks = (status(0, Phase.BACKWARD), status(1, Phase.FORWARD))

    assert len(found(*ranks, usual=usual, now=1000.0 + seconds)) == lag


def test_in_the_first_step_ranks_can_lag_as_well():
    ranks = (status(0, Phase.BACKWARD, 1), status(1, Phase.FORWARD, 1))

    assert found(*ranks, last=None, usual=None) == [(1, "forward")]


def test_a_run_that_is_over_has_no_laggards():
    assert found(status(0, Phase.ENDED, end=EndReason.KILLED)) == []
    assert found() == []
