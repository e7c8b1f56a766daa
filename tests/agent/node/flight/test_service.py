"""The node agent's recorder: what it writes of running ranks, when, and what it never does."""

import threading
import time
from pathlib import Path

import pytest

from mp_agent.flight.record.evidence import load
from mp_agent.node.flight.service import (
    BUSY_SECONDS_MAX,
    DumpRequest,
    FlightService,
    pop_answer,
    write_request,
)
from mp_agent.records.flight import FlightRequest
from mp_agent.records.node_report import Receipt
from mp_agent.records.reports import decode_receipt, encode_receipt
from mp_agent.records.steps import EndReason
from mp_agent.settings import Settings
from tests.agent.node.agent_process import wait_for_status
from tests.agent.records.samples import make_event
from tests.waiting import wait_until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        port=0,
        dir=tmp_path / "shm",
        log_dir=tmp_path / "log",
        flight_dir=tmp_path / "flight",
        flight_steps=20,
        token="hush-hush",
    )


@pytest.fixture
def recorder(settings: Settings) -> FlightService:
    return FlightService(settings)


def records(settings: Settings) -> list[Path]:
    return sorted(settings.flight_dir.glob("*/*/node*.npz"))


def settled(recorder: FlightService, run, *, written: int) -> None:
    wait_until(lambda: sum(counts(recorder, run)) >= written, what=f"{written} record(s)")
    assert not recorder.busy(run, 0.0)


def counts(recorder: FlightService, run) -> tuple[int, int]:
    """Return how many records were written, and how many could not be."""
    recorder.tick(0.0)
    return recorder.counts(run)


def analyse(run) -> None:
    """Let a critical condition begin."""
    for listener in run.conditions.listeners:
        listener(make_event(name="MpAgentX"))


def look(recorder: FlightService, run, now_seconds: float = 0.0) -> None:
    run.poll(now_seconds)
    recorder.poll(run, now_seconds)


def test_a_critical_condition_is_recorded_with_its_last_steps(
    start_rank, open_run, recorder, settings
):
    ranks = [start_rank(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.steps(5, loss=2.0)
        rank.layer_table(sum_squares=4.0)
        rank.steps(40, loss=2.0)
    run = open_run()
    look(recorder, run)
    assert not records(settings)
    analyse(run)
    look(recorder, run)
    settled(recorder, run, written=1)
    (path,) = records(settings)
    assert path.parent.name.endswith("Z-MpAgentX")
    evidence = load(path)
    for log in evidence.ranks:
        steps = [step.sequence for segment in log.segments for step in segment.steps]
        assert steps == list(range(26, 46))
        assert [table.sequence for s in log.segments for table in s.tables] == [5]
        assert log.end is EndReason.RUNNING
    assert evidence.conditions[0].name == "MpAgentX"
    assert "token" not in evidence.settings and evidence.settings["flight_steps"] == 20
    assert b"hush-hush" not in path.read_bytes()
    look(recorder, run)
    assert len(records(settings)) == 1


def test_tables_that_the_ring_no_longer_has_are_recorded(start_rank, open_run, recorder, settings):
    rank, run = start_rank(), open_run()
    for _ in range(9):
        rank.steps()
        rank.layer_table(sum_squares=4.0)
        look(recorder, run)
    analyse(run)
    look(recorder, run)
    settled(recorder, run, written=1)
    (log,) = load(records(settings)[0]).ranks
    tables = [table.sequence for segment in log.segments for table in segment.tables]
    assert tables == list(range(1, 10))
    assert len(log.segments) == 1


def test_a_killed_rank_is_recorded_once_with_the_step_it_died_in(
    start_rank, open_run, recorder, settings
):
    rank, run = start_rank(), open_run()
    rank.steps(3, loss=2.0)
    rank.open_step(loss=2.0)
    look(recorder, run)
    rank.kill()
    for _ in range(3):
        look(recorder, run)
    settled(recorder, run, written=1)
    (path,) = records(settings)
    assert path.parent.name.endswith("Z-killed")
    (log,) = load(path).ranks
    assert log.end is EndReason.KILLED
    assert [step.sequence for s in log.segments for step in s.steps] == [1, 2, 3, 4]


def test_completion_is_not_recorded(start_rank, open_run, recorder, settings):
    rank, run = start_rank(), open_run()
    rank.steps(3)
    rank.end(EndReason.COMPLETED)
    rank.exit()
    look(recorder, run)
    look(recorder, run)
    assert counts(recorder, run) == (0, 0) and not recorder.busy(run, 0.0)


def test_a_request_is_answered_with_the_file(start_rank, open_run, run_dir, recorder, settings):
    rank, run = start_rank(), open_run()
    rank.steps(3)
    asked = DumpRequest(id="x", requested_unix_seconds=0.0)
    write_request(run_dir, asked)
    look(recorder, run)
    answer = wait_until(lambda: pop_answer(run_dir, asked), what="an answer")
    assert (answer.path, answer.problem) == (str(records(settings)[0]), "")
    assert sorted(path.name for path in run_dir.glob("flight*")) == []


def test_records_that_are_switched_off_are_refused_on_request(
    start_rank, open_run, run_dir, settings
):
    recorder = FlightService(settings.model_copy(update={"flight_records_max": 0}))
    rank, run = start_rank(), open_run()
    rank.steps(3)
    asked = DumpRequest(id="x", requested_unix_seconds=0.0)
    write_request(run_dir, asked)
    look(recorder, run)
    analyse(run)
    look(recorder, run)
    answer = pop_answer(run_dir, asked)
    assert answer is not None and "disabled" in answer.problem
    rank.kill()
    look(recorder, run)
    assert not records(settings)


def test_a_directory_that_cannot_be_written_is_counted_and_harms_nothing(
    start_rank, open_run, recorder, settings, caplog
):
    settings.flight_dir.parent.mkdir(exist_ok=True)
    settings.flight_dir.write_text("a file where the directory should be")
    rank, run = start_rank(), open_run()
    rank.steps(3)
    look(recorder, run)
    analyse(run)
    look(recorder, run)
    settled(recorder, run, written=1)
    assert counts(recorder, run) == (0, 1)
    assert "flight record of run llama cannot be written" in caplog.text
    assert run.attempt.newest_sequence == 3


def test_a_disk_that_does_not_answer_delays_nothing_for_long(
    start_rank, open_run, run_dir, recorder, settings, monkeypatch
):
    gate = threading.Event()
    monkeypatch.setattr("mp_agent.node.flight.job.write_record", lambda *a, **k: gate.wait(30))
    rank, run = start_rank(), open_run()
    rank.steps(3)
    look(recorder, run)
    analyse(run)
    begun = time.monotonic()
    look(recorder, run)
    for number in range(20):
        write_request(run_dir, DumpRequest(id=f"{number}", requested_unix_seconds=0.0))
        look(recorder, run)
    assert time.monotonic() - begun < 5.0
    assert counts(recorder, run)[1] > 0
    assert recorder.busy(run, BUSY_SECONDS_MAX - 1) and not recorder.busy(run, BUSY_SECONDS_MAX)
    gate.set()


def test_other_nodes_write_the_steps_that_the_root_names_once(
    start_rank, open_run, recorder, settings
):
    # A node that does not hold rank 0.
    rank = start_rank(1, world_size=2, local_rank=0, local_world_size=1, node_rank=1)
    run = open_run()
    rank.steps(30)
    look(recorder, run)
    request = FlightRequest(
        name="20260221T000000.000Z-request",
        reason="request",
        first=4,
        last=9,
        requested_unix_seconds=0.0,
    )
    receipt = Receipt(
        session=run.session,
        accepted=True,
        position=0,
        layers_position=0,
        settled=0,
        layers_settled=0,
        flight=request,
    )
    for _ in range(3):
        run.acknowledge(decode_receipt(encode_receipt(receipt)))
        look(recorder, run)
    settled(recorder, run, written=1)
    (path,) = records(settings)
    assert (path.parent.name, path.name) == (request.name, "node1.npz")
    (log,) = load(path).ranks
    assert [s.sequence for segment in log.segments for s in segment.steps] == list(range(4, 10))


def test_the_root_asks_all_nodes_for_what_it_records_itself(
    start_rank, open_run, recorder, settings
):
    rank, run = start_rank(0, world_size=2, local_rank=0, local_world_size=1), open_run()
    rank.steps(30)
    look(recorder, run)
    before = run.flight_request
    assert before is None
    analyse(run)
    look(recorder, run)
    settled(recorder, run, written=1)
    request = run.flight_request
    assert request is not None and request.name == records(settings)[0].parent.name
    assert (request.first, request.last) == (11, 30)


@pytest.mark.slow
def test_an_agent_that_does_not_linger_records_the_end_before_it_lets_go(
    start, start_rank, run_dir, settings
):
    rank = start_rank()
    rank.steps(30, loss=2.0)
    agent = start(linger_seconds=0.0, bind="127.0.0.1")
    wait_for_status(run_dir)
    rank.kill()
    agent.wait(30)
    assert not run_dir.exists()
    (path,) = records(settings)
    assert load(path).ranks[0].end is EndReason.KILLED
