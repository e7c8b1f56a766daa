import pytest

from mp_agent.node.collect.rank_source import furthest_behind, rank_end, run_end
from mp_agent.records.node_report import RankStatus
from mp_agent.records.steps import EndReason, Phase
from tests.agent.node.builders import make_state


@pytest.mark.parametrize(
    ("marker", "alive", "expected"),
    [
        (EndReason.RUNNING, True, EndReason.RUNNING),
        (EndReason.RUNNING, False, EndReason.KILLED),
        (EndReason.COMPLETED, True, EndReason.COMPLETED),
        (EndReason.COMPLETED, False, EndReason.COMPLETED),
        (EndReason.FAILED, False, EndReason.FAILED),
    ],
)
def test_the_marker_is_the_end_and_death_without_one_is_a_kill(marker, alive, expected):
    assert rank_end(make_state(end_reason=marker), alive=alive) is expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], EndReason.RUNNING),
        ([EndReason.COMPLETED, EndReason.RUNNING], EndReason.RUNNING),
        ([EndReason.COMPLETED, EndReason.COMPLETED], EndReason.COMPLETED),
        ([EndReason.KILLED, EndReason.COMPLETED], EndReason.KILLED),
        ([EndReason.KILLED, EndReason.FAILED, EndReason.COMPLETED], EndReason.FAILED),
    ],
)
def test_a_run_ends_with_its_last_rank_and_as_the_gravest(ranks, expected):
    assert run_end(ranks) is expected


def status(
    rank: int, phase: Phase, started_sequence: int, end: EndReason = EndReason.RUNNING
) -> RankStatus:
    return RankStatus(
        rank=rank,
        phase=phase,
        phase_name=phase.name.lower(),
        started_sequence=started_sequence,
        committed_sequence=0,
        end=end,
    )


def test_the_rank_furthest_behind_is_on_the_lowest_step_then_in_the_earliest_phase():
    ahead = status(0, Phase.FORWARD, 8)
    behind = status(1, Phase.OPTIMIZER, 7)
    furthest = status(2, Phase.BACKWARD, 7)

    assert furthest_behind([ahead, behind, furthest]) is furthest


def test_a_rank_that_has_ended_is_not_behind():
    ended = status(0, Phase.FORWARD, 3, end=EndReason.KILLED)
    running = status(1, Phase.FORWARD, 7)

    assert furthest_behind([ended, running]) is running
    assert furthest_behind([ended]) is None
    assert furthest_behind([]) is None
