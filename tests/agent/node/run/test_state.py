"""A run that goes from one node agent to the next, over a ledger in a real directory."""

import pytest

from mp_agent.node.run.state import RunState
from mp_agent.records.steps import EndReason
from mp_agent.settings import Settings
from tests.agent.node.conftest import OpenRun, StartRank
from tests.agent.node.shown import MERGE_DEADLINE_SECONDS, shown


def test_a_successor_continues_the_counters_exactly(start_rank: StartRank, open_run: OpenRun):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    run = open_run()
    run.poll(0.0)
    for rank in ranks:
        rank.steps(5, loss_scale=64.0)
    run.poll(0.0)
    run.commit()
    for rank in ranks:
        rank.steps(2, loss_scale=32.0)
    run.poll(0.0)
    before = shown(run)
    ranks[0].steps(1, loss_scale=16.0)
    run.poll(0.0)

    successor = open_run()
    successor.poll(0.0)
    after = shown(successor)
    assert after == {
        **before,
        "rank_step{0}": 8.0,
        "rank_last_step_timestamp_seconds{0}": 100.0,
    }
    assert after["steps_total"] == 7
    assert after["loss_scale_decreases_total"] == 1

    ranks[1].steps(1, loss_scale=16.0)
    successor.poll(0.0)
    assert shown(successor)["loss_scale_decreases_total"] == 2


def test_a_successor_after_the_end_reports_the_same_end(start_rank: StartRank, open_run: OpenRun):
    rank = start_rank()
    rank.steps(5, loss=1.5)
    rank.end(EndReason.COMPLETED)
    rank.exit()
    run = open_run()
    run.poll(0.0)
    run.commit()
    successor = open_run()
    successor.poll(0.0)

    assert shown(successor) == shown(run)


def test_a_successor_knows_what_was_lost_before_it(start_rank: StartRank, open_run: OpenRun):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    ranks[0].steps()
    run = open_run()
    run.poll(0.0)
    run.poll(MERGE_DEADLINE_SECONDS)
    ranks[1].steps()
    run.poll(MERGE_DEADLINE_SECONDS)
    run.commit()
    assert shown(run)["records_dropped_total{0}"] == 1

    successor = open_run()
    successor.poll(0.0)
    assert shown(successor)["records_dropped_total{0}"] == 1


def test_a_successor_counts_an_ended_attempts_probes_once(start_rank: StartRank, open_run: OpenRun):
    start_rank(0).count(probe_errors=3)
    run = open_run()
    run.poll(0.0)
    start_rank(0, attempt=1, created_unix_ns=9_000).count(probe_errors=1)
    run.poll(0.0)
    run.commit()
    successor = open_run()
    successor.poll(0.0)

    assert shown(run)["probe_errors_total{0}"] == 4
    assert shown(successor)["probe_errors_total{0}"] == 4


def test_a_full_directory_costs_the_ledger_but_not_the_run(
    start_rank: StartRank, open_run: OpenRun, monkeypatch, caplog
):
    rank = start_rank()
    run = open_run()
    run.poll(0.0)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mp_agent.node.run.ledger.replace_atomically", full)
    rank.steps()
    run.poll(0.0)
    run.commit()

    assert "No space left" in caplog.text
    assert shown(run)["steps_total"] == 1


@pytest.mark.slow
def test_a_successor_knows_since_when_counters_count_and_how_often_the_run_started(
    start_rank: StartRank, open_run: OpenRun
):
    start_rank(created_unix_ns=100 * 10**9).steps(3)
    run = open_run()
    run.poll(0.0)
    run.commit()
    assert run.export(0.0, 150.0).agent.counting_seconds == 50.0
    assert shown(run)["run_attempts_total"] == 1

    start_rank(created_unix_ns=400 * 10**9, attempt=1).steps(2)
    successor = open_run()
    successor.poll(0.0)
    values = shown(successor)
    assert successor.export(0.0, 450.0).agent.counting_seconds == 350.0
    assert values["run_attempts_total"] == 2
    assert (values["attempt_step"], values["steps_total"]) == (2, 5)


def test_thresholds_set_among_the_alerts_count_as_those_set_by_themselves(tmp_path):
    by_themselves = RunState(tmp_path, Settings(thresholds={"grad_norm_high": 7.0}))
    among_alerts = RunState(tmp_path, Settings(alerts={"grad_norm_high": "7"}))
    assert among_alerts.thresholds == by_themselves.thresholds
    assert among_alerts.thresholds["grad_norm_high"] == 7.0
