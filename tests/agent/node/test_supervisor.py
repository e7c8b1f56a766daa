"""The life of a run in a node agent's care, on a clock that the test moves."""

import logging
from pathlib import Path

import pytest

from mp_agent.node.endpoint import Endpoint
from mp_agent.node.flight.service import FlightService
from mp_agent.node.http.status import ScrapeLog
from mp_agent.node.registry import FIRST_RING_SECONDS, RunRegistry, RunSupervisor
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.settings import Settings
from tests.agent.node.conftest import StartRank

LINGER_SECONDS = 60.0


@pytest.fixture
def watch(run_dir: Path, settings: Settings) -> RunSupervisor:
    run_dir.mkdir(parents=True)
    lock_fd = locations.hold_agent_lock(run_dir)
    assert lock_fd is not None
    return RunSupervisor(run_dir, lock_fd, settings, setting_errors=0, now_seconds=0.0)


@pytest.mark.slow
def test_a_run_whose_ranks_never_show_up_is_given_up(watch: RunSupervisor):
    watch.poll(0.0)
    assert not watch.over(FIRST_RING_SECONDS - 1)
    assert watch.over(FIRST_RING_SECONDS)


def test_a_run_is_over_when_the_linger_after_its_end_is(
    watch: RunSupervisor, start_rank: StartRank
):
    rank = start_rank()
    watch.poll(0.0)
    assert not watch.over(10_000.0)

    rank.end(EndReason.COMPLETED)
    watch.poll(10_000.0)
    assert not watch.over(10_000.0 + LINGER_SECONDS - 1)
    assert watch.over(10_000.0 + LINGER_SECONDS)


def test_an_attempt_that_begins_and_ends_between_two_polls_lingers_as_any_other(
    watch: RunSupervisor, start_rank: StartRank
):
    start_rank().kill()
    watch.poll(0.0)
    scrapes = ScrapeLog()
    watch.record_scrape("prometheus", final=True)
    assert not watch.needed(scrapes, 0.0)

    start_rank(attempt=1, created_unix_ns=9_000).kill()
    watch.poll(LINGER_SECONDS - 1)
    assert watch.needed(scrapes, LINGER_SECONDS - 1), "no scraper has seen this end yet"
    assert not watch.over(2 * LINGER_SECONDS - 2)
    assert watch.over(2 * LINGER_SECONDS - 1)


def test_what_is_over_leaves_nothing_behind(
    watch: RunSupervisor, start_rank: StartRank, run_dir: Path
):
    start_rank().kill()
    watch.poll(0.0)
    watch.commit(0.0)
    watch.publish(Endpoint("0.0.0.0", 9464), final_exported=False)

    assert watch.remove()
    assert not run_dir.exists()
    assert run_dir.parent.exists()


def test_a_ledger_that_takes_long_to_write_is_written_less_often(
    watch: RunSupervisor, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
):
    start_rank()
    commits: list[float] = []
    clock = iter(range(1, 100))
    monkeypatch.setattr(watch.run, "commit", lambda: commits.append(next(clock) / 50))
    monkeypatch.setattr("time.thread_time", lambda: sum(commits[-1:]))
    for now_seconds in range(10):
        watch.poll(float(now_seconds))
    assert len(commits) == 5, "after 2 s each, of which every commit took 20 ms"


def test_an_attempt_that_begins_while_files_are_removed_is_taken_up(
    watch: RunSupervisor, start_rank: StartRank, run_dir: Path
):
    start_rank().kill()
    watch.poll(0.0)
    start_rank(attempt=1, created_unix_ns=9_000).steps(2)

    assert not watch.remove()
    watch.poll(LINGER_SECONDS)
    watch.publish(None, final_exported=False)
    assert not watch.over(LINGER_SECONDS)
    assert not watch.ended
    assert locations.read_status(run_dir) is not None
    watch.run.commit()
    assert locations.ledger_path(run_dir).exists()


def test_an_attempt_that_begins_right_after_the_removal_is_watched(
    settings: Settings, start_rank: StartRank, run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    registry = RunRegistry(settings, FlightService(settings))
    registry.base = run_dir.parent
    start_rank().kill()
    registry.add_new()
    registry.poll(0.0)
    remove = RunSupervisor.remove

    def remove_and_begin(supervisor: RunSupervisor) -> bool:
        removed = remove(supervisor)
        start_rank(attempt=1, created_unix_ns=9_000).steps(2)
        return removed

    monkeypatch.setattr(RunSupervisor, "remove", remove_and_begin)
    registry.poll(LINGER_SECONDS + 1)
    assert len(registry) == 0
    registry.add_new()
    assert [run.run_dir for run in registry.runs] == [run_dir]
    registry.release()


def test_the_end_is_exported_once_a_scrape_has_shown_it(
    watch: RunSupervisor, start_rank: StartRank
):
    rank, scrapes = start_rank(), ScrapeLog()
    watch.poll(0.0)
    watch.record_scrape("p", final=False)
    rank.end(EndReason.COMPLETED)
    watch.poll(1.0)
    assert not watch.final_exported(scrapes, 1.0)

    watch.record_scrape("p", final=True)
    assert watch.final_exported(scrapes, 1.0)


def test_a_look_by_hand_does_not_stand_for_the_server_that_scrapes(
    watch: RunSupervisor, start_rank: StartRank
):
    rank, scrapes = start_rank(), ScrapeLog()
    for time in (0.0, 15.0):
        scrapes.record("prometheus", time)
    rank.end(EndReason.COMPLETED)
    watch.poll(16.0)
    scrapes.record("curl", 17.0)
    watch.record_scrape("curl", final=True)
    assert not watch.final_exported(scrapes, 17.0)

    scrapes.record("prometheus", 30.0)
    watch.record_scrape("prometheus", final=True)
    assert watch.final_exported(scrapes, 30.0)


def test_a_new_attempt_has_an_end_of_its_own(watch: RunSupervisor, start_rank: StartRank):
    rank, scrapes = start_rank(), ScrapeLog()
    rank.end(EndReason.FAILED)
    watch.poll(0.0)
    watch.record_scrape("p", final=True)
    second = start_rank(attempt=1, created_unix_ns=9_000)
    watch.poll(1.0)
    second.end(EndReason.COMPLETED)
    watch.poll(2.0)

    assert not watch.final_exported(scrapes, 2.0)


def test_scrapes_are_counted_on_from_the_agent_before(
    watch: RunSupervisor, run_dir: Path, settings: Settings
):
    watch.record_scrape("p", final=False)
    watch.publish(None, final_exported=False)
    successor = RunSupervisor(run_dir, -1, settings, setting_errors=0, now_seconds=0.0)
    successor.record_scrape("p", final=False)
    successor.publish(None, final_exported=False)

    status = locations.read_status(run_dir)
    assert status is not None
    assert status.scrapes_total == 2


def test_a_failing_look_is_logged_once_and_the_watch_goes_on(
    watch: RunSupervisor, start_rank: StartRank, monkeypatch, caplog
):
    def fail(now_seconds: float) -> None:
        raise ZeroDivisionError(f"at {now_seconds}")

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(watch.run, "poll", fail)
        for time in range(5):
            watch.poll(float(time))
    assert len(caplog.records) == 1

    start_rank()
    watch.poll(6.0)
    assert watch.run.seen
