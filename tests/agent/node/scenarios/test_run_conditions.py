"""Conditions of a run read from real rings: reported, exported, and kept across node agents."""

import time
from pathlib import Path

import pytest

from mp_agent.node.conditions import tracker
from mp_agent.ring.run_files import read_conditions
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import shown

EXPLOSION = "MpAgentGradientExplosion,critical"


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "PROCESSOR_SHARE", 1.0)


def test_an_exploding_step_among_many_reaches_the_file_and_the_metrics(
    start_rank: StartRank, open_run: OpenRun, run_dir: Path
):
    rank = start_rank()
    rank.steps(20)
    rank.steps(1, gradients={"sum_squares": 1e8})
    rank.steps(20)
    run = open_run()
    run.poll(0.0)

    values = shown(run)
    assert values[f"condition_active{{{EXPLOSION}}}"] == 1
    assert values[f"condition_fired_total{{{EXPLOSION}}}"] == 1
    assert values["condition_active{MpAgentRunStalled,critical}"] == 0
    news = read_conditions(run_dir)
    assert news is not None
    (event,) = news.after(0)
    assert (event.condition.name, event.condition.since_step) == ("MpAgentGradientExplosion", 21)


def test_the_next_node_agent_goes_on_where_the_last_one_committed(
    start_rank: StartRank, open_run: OpenRun, run_dir: Path
):
    rank = start_rank(created_unix_ns=time.time_ns())
    rank.steps(5)
    rank.steps(1, gradients={"sum_squares": 1e8})
    first = open_run()
    first.poll(0.0)
    first.commit()

    rank.steps(5)
    successor = open_run()
    successor.poll(0.0)
    values = shown(successor)
    assert values[f"condition_active{{{EXPLOSION}}}"] == 1
    assert values[f"condition_fired_total{{{EXPLOSION}}}"] == 1
    news = read_conditions(run_dir)
    assert news is not None and news.last_number == 1


def test_a_finding_without_a_step_is_committed_too(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank()
    rank.steps(3)
    first = open_run()
    for minute in range(15):
        first.poll(minute * 60.0)
        first.commit()
    stalled = "condition_fired_total{MpAgentRunStalled,warning}"
    assert shown(first)[stalled] == 1
    successor = open_run()
    successor.poll(0.0)
    assert shown(successor)[stalled] == 1


def test_a_node_without_rank_0_judges_nothing(
    start_rank: StartRank, open_run: OpenRun, run_dir: Path
):
    rank = start_rank(1, world_size=2, local_world_size=1, node_rank=1, local_rank=0)
    rank.steps(3, gradients={"sum_squares": 1e8})
    run = open_run()
    run.poll(0.0)
    assert not any(key.startswith("condition") for key in shown(run))
    assert read_conditions(run_dir) is None
