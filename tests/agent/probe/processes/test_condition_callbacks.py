"""Conditions that reach a process: what is reported, when, and what a callback may do."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import mp_agent
from mp_agent.probe import api, attachment
from mp_agent.probe.processes import callbacks
from mp_agent.probe.processes.callbacks import ConditionCallbacks
from mp_agent.records.conditions import ConditionEvent
from mp_agent.records.steps import Phase
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from mp_agent.ring.run_files import ConditionNews, conditions_path, write_conditions
from tests.agent.records.samples import make_event
from tests.agent.ring.test_conditions_file import news_of


@pytest.fixture(autouse=True)
def looks_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "POLL_INTERVAL_SECONDS", 0.0)


@pytest.fixture
def received() -> list[ConditionEvent]:
    return []


@pytest.fixture
def start(tmp_path: Path, received: list[ConditionEvent]) -> Callable[..., ConditionCallbacks]:
    def start_(
        *callbacks: Callable[[ConditionEvent], object], logs: bool = False
    ) -> ConditionCallbacks:
        failures: list[None] = []
        watch = ConditionCallbacks(
            tmp_path,
            callbacks or (received.append,),
            logs=logs,
            on_failure=lambda: failures.append(None),
        )
        watch.failures = failures  # type: ignore[attr-defined]
        return watch

    return start_


class TestLooking:
    def test_each_event_is_found_once(self, start, tmp_path):
        watch = start()
        assert watch.poll() == ()
        news = news_of(make_event(rank="1", layer="head"))
        write_conditions(tmp_path, news)
        (found,) = watch.poll()
        assert (found.state, found.name, found.severity) == (
            "firing",
            "MpAgentGradientExplosion",
            "critical",
        )
        assert (found.run, found.step, found.since_step) == ("llama", 8, 7)
        assert (found.rank, found.layer, found.value) == ("1", "head", 2000.0)
        assert found.summary and found.description and found.remedy
        assert watch.poll() == ()
        write_conditions(tmp_path, news.with_event(make_event(name="MpAgentLossNonFinite")))
        assert [condition.name for condition in watch.poll()] == ["MpAgentLossNonFinite"]
        assert watch.poll() == ()

    def test_what_was_there_before_is_of_another_attempt(self, start, tmp_path):
        news = news_of(make_event())
        write_conditions(tmp_path, news)
        watch = start()
        assert watch.poll() == ()
        write_conditions(tmp_path, news.with_event(make_event(name="MpAgentLossNonFinite")))
        assert [condition.name for condition in watch.poll()] == ["MpAgentLossNonFinite"]

    def test_another_epoch_is_reported_from_its_first_event_on(self, start, tmp_path):
        write_conditions(tmp_path, news_of(make_event(), make_event()))
        watch = start()
        write_conditions(tmp_path, ConditionNews(epoch="b").with_event(make_event()))
        assert len(watch.poll()) == 1

    @pytest.mark.parametrize("content", [b"", b"junk", b"\x00" * 200_000])
    def test_a_damaged_file_brings_nothing_and_the_next_one_is_read(self, start, tmp_path, content):
        watch = start()
        conditions_path(tmp_path).write_bytes(content)
        assert watch.poll() == ()
        write_conditions(tmp_path, news_of(make_event()))
        assert len(watch.poll()) == 1

    def test_a_file_that_has_not_changed_is_not_opened_again(self, start, tmp_path, monkeypatch):
        write_conditions(tmp_path, news_of(make_event()))
        watch = start()
        monkeypatch.setattr(callbacks, "read_conditions", lambda run_dir: pytest.fail("read"))
        assert watch.poll() == ()


class TestNotifying:
    def test_what_a_callback_raises_is_contained_logged_once_and_counted(
        self, start, received, tmp_path, caplog
    ):
        def broken(condition: ConditionEvent) -> None:
            raise LookupError("no such checkpoint")

        watch = start(broken, received.append)
        write_conditions(tmp_path, news_of(make_event(), make_event()))
        watch.deliver(watch.poll())
        assert len(received) == 2
        assert len(watch.failures) == 2
        (record,) = caplog.records
        assert "broken raised LookupError" in record.getMessage()

    def test_the_end_of_the_process_is_the_callbacks_to_decide(self, start, tmp_path):
        def stop(condition: ConditionEvent) -> None:
            raise SystemExit(3)

        watch = start(stop)
        write_conditions(tmp_path, news_of(make_event()))
        with pytest.raises(SystemExit):
            watch.deliver(watch.poll())

    @pytest.mark.parametrize(
        ("severity", "level"),
        [("critical", logging.CRITICAL), ("warning", logging.WARNING), ("info", logging.INFO)],
    )
    def test_rank_0_logs_the_alerts_first_line_at_the_level_of_the_severity(
        self, start, tmp_path, caplog, severity, level
    ):
        caplog.set_level(logging.INFO, "mp_agent")
        watch = start(logs=True)
        write_conditions(tmp_path, news_of(make_event(severity=severity)))
        (condition,) = watch.poll()
        watch.deliver([condition])
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("mp_agent", level)
        assert record.getMessage() == (
            f"{condition.name} ({severity}) since step 7: "
            f"{condition.summary} {condition.description} {condition.remedy}"
        )


class Job:
    """A process of a world of one, trained in the test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0

    def step(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.steps += 1

    def reader(self) -> RingReader:
        return RingReader.open(locations.find_rings(self.run_dir)[0])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Job]]:
    monkeypatch.setattr(api, "_callbacks", [])

    def start_() -> Job:
        mp_agent.init(dir=tmp_path / "shm", run="llama", node_agent="none")
        return Job(locations.run_directory(tmp_path / "shm", "llama"))

    yield start_
    mp_agent.shutdown()


class TestInTraining:
    def test_callbacks_from_before_and_after_init_hear_it_at_the_end_of_a_step(self, job, received):
        @mp_agent.on_condition
        def early(condition: mp_agent.ConditionEvent) -> None:
            received.append(condition)

        training = job()
        heard_at: list[int] = []
        mp_agent.on_condition(lambda condition: heard_at.append(training.steps))
        mp_agent.on_condition(early)
        training.step()
        write_conditions(training.run_dir, news_of(make_event()))
        assert not received
        training.step()
        assert [condition.name for condition in received] == ["MpAgentGradientExplosion"]
        assert heard_at == [1]
        training.step()
        assert len(received) == 1

    def test_a_callback_is_outside_of_the_probe(self, job):
        """Its own phases and steps are seen, and its time is not the probe's."""
        training = job()
        seen: list[Phase] = []

        def save(condition: ConditionEvent) -> None:
            with mp_agent.phase("checkpoint"):
                reader = training.reader()
                seen.append(reader.state.phase)
                reader.close()
            training.step()

        mp_agent.on_condition(save)
        training.step()
        write_conditions(training.run_dir, news_of(make_event()))
        training.step()
        assert seen == [Phase.CHECKPOINT]
        reader = training.reader()
        assert reader.state.committed_sequence == 3
        reader.close()

    def test_a_callback_that_raises_every_time_does_not_end_the_watching(self, job):
        training = job()

        def broken(condition: ConditionEvent) -> None:
            raise ValueError("no")

        mp_agent.on_condition(broken)
        training.step()
        news = ConditionNews(epoch="a")
        for _ in range(15):
            news = news.with_event(make_event())
            write_conditions(training.run_dir, news)
            training.step()
        reader = training.reader()
        assert reader.state.committed_sequence == 16
        assert reader.state.probe_errors == 15
        reader.close()

    def test_what_cannot_be_called_is_refused_without_raising(self, job, caplog):
        mp_agent.on_condition("print")  # type: ignore[type-var]
        assert "'print' cannot be called" in caplog.text
        job().step()

    def test_a_file_that_is_not_ours_does_no_harm(self, job, received):
        mp_agent.on_condition(received.append)
        training = job()
        training.step()
        os.mkfifo(conditions_path(training.run_dir))
        training.step()
        conditions_path(training.run_dir).unlink()
        conditions_path(training.run_dir).mkdir()
        training.step()
        reader = training.reader()
        assert reader.state.committed_sequence == 3
        assert reader.state.probe_errors == 0
        reader.close()
        assert not received
