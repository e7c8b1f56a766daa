"""From closed steps to events, in the account of one run, without rings or processes."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node import conditions as module
from mp_agent.node.accumulate import Accumulator, Progress
from mp_agent.node.conditions import ConditionTracker
from mp_agent.node.counters import CounterBook
from mp_agent.node.snapshot_builder import RunExport
from mp_agent.node.window import ValueWindow
from mp_agent.records.conditions import ConditionEvent, ConditionMemory
from mp_agent.records.merged import AgentView, RunView
from mp_agent.records.steps import EndReason
from mp_agent.ring.conditions_file import conditions_path, read_conditions
from tests.agent.node.builders import make_identity, merged_step

EXPLOSION, UPDATE = "MpAgentGradientExplosion", "MpAgentNonFiniteUpdate"
HEALTHY = {"norm": 1.0, "loss": 2.0, "skipped": 0.0, "step_seconds": 0.1, "nan_elements": 0.0}

AGENT = AgentView(
    version="0.1.0",
    probe_seconds=0.0,
    probe_errors=0,
    setting_errors=0,
    records_dropped=0,
    series_dropped=0,
    scrape_duration_seconds=None,
    unsupported=(),
)


class Training:
    """A run as the node agent accounts for it, and the clock of its loop."""

    def __init__(self, run_dir: Path, memory: ConditionMemory | None = None, **earlier: Any):
        self.account = Accumulator(
            resolve({}),
            progress=earlier.get("progress", Progress()),
            counters=earlier.get("counters", CounterBook()),
            norms=ValueWindow(120.0),
        )
        self.tracker = ConditionTracker(
            run_dir,
            values_in_force(),
            memory=memory or ConditionMemory(),
            earlier=earlier.get("counters"),
        )
        self.events: list[ConditionEvent] = []
        self.tracker.listeners.append(self.events.append)
        self.now_seconds, self.sequence = 1_000.0, earlier.get("sequence", 0)
        self.looks = 0

    def step(self, **values: float) -> None:
        self.sequence += 1
        step = merged_step(self.sequence, **{**HEALTHY, **values})
        self.account.fold_step(step)
        self.tracker.after_step(self.account.progress, self.now_seconds, self.export)

    def wait(self, seconds: float) -> None:
        self.now_seconds += seconds
        self.tracker.tick(self.now_seconds, self.export)

    def train(self, seconds: float, *, every: float = 1.0, **values: float) -> None:
        for _ in range(round(seconds / every)):
            self.wait(every)
            self.step(**values)

    def export(self) -> RunExport:
        self.looks += 1
        progress = self.account.progress
        extremes = self.account.norms.extremes(self.now_seconds)
        view = RunView(
            identity=make_identity(),
            facts={},
            nodes=1,
            active=True,
            end_reason=EndReason.RUNNING,
            phase_name="forward",
            last=progress.last,
            judged=progress.judged,
            loss=progress.loss,
            loss_scale=progress.loss_scale,
            loss_scale_initial=progress.loss_scale_initial,
            norm_window_max=extremes[0] if extremes else None,
            first_nonfinite=progress.incident.first,
            health=self.account.health(),
            conditions=self.tracker.active,
            conditions_fired=self.tracker.fired,
        )
        return RunExport(
            run="llama",
            node_rank=0,
            view=view,
            layers=(),
            ranks=(),
            faded_ranks=frozenset(),
            agent=AGENT,
            counters=self.account.counters,
        )

    def heard(self) -> list[tuple[str, str, str]]:
        return [(e.state, e.condition.name, e.condition.severity) for e in self.events]


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge every step, however fast the test makes them."""
    monkeypatch.setattr(module, "PROCESSOR_SHARE", 1.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def training(run_dir: Path) -> Training:
    found = Training(run_dir)
    found.train(60)
    return found


class TestEvents:
    def test_a_healthy_run_brings_none(self, training: Training, run_dir: Path):
        training.train(300)
        assert training.events == []
        assert training.tracker.active == ()
        assert not conditions_path(run_dir).exists()

    def test_one_step_is_enough_and_its_number_is_named(self, training: Training):
        training.step(norm=5_000.0)
        (event,) = training.events
        active = event.condition
        assert (event.state, active.name, active.severity) == ("firing", EXPLOSION, "critical")
        assert (event.step, active.since_step, active.run) == (61, 61, "llama")
        assert active.value == 1
        assert "run llama was above 1000 on 1 step(s)" in active.description
        assert "Clip gradients" in active.remedy and active.summary.endswith(".")

    def test_it_is_over_when_its_window_has_passed(self, training: Training):
        training.step(norm=5_000.0)
        training.train(400)
        assert training.heard()[0] == ("firing", EXPLOSION, "critical")
        assert ("resolved", EXPLOSION, "critical") in training.heard()
        assert training.tracker.active == ()

    def test_a_milder_severity_is_muted_but_is_in_force(self, training: Training):
        training.step(norm=5_000.0)
        training.train(30, norm=200.0)
        severities = {c.severity for c in training.tracker.active if c.name == EXPLOSION}
        assert severities == {"critical", "warning"}
        assert training.heard() == [("firing", EXPLOSION, "critical")]
        assert training.tracker.fired[EXPLOSION, "warning"] == 1

    def test_it_is_told_once_the_worse_one_is_over_and_then_its_end_too(self, training: Training):
        training.step(norm=5_000.0)
        training.train(320, norm=200.0)
        assert training.heard() == [
            ("firing", EXPLOSION, "critical"),
            ("resolved", EXPLOSION, "critical"),
            ("firing", EXPLOSION, "warning"),
        ]
        training.train(320)
        assert training.heard()[3:] == [("resolved", EXPLOSION, "warning")]

    def test_of_one_that_was_never_told_the_end_is_not_told_either(self, training: Training):
        training.train(800, norm=1e-7)
        vanishing = [c for c in training.tracker.active if c.name == "MpAgentGradientVanishing"]
        assert {c.severity for c in vanishing} == {"critical", "warning"}
        training.train(10)
        assert training.heard() == [
            ("firing", "MpAgentGradientVanishing", "critical"),
            ("resolved", "MpAgentGradientVanishing", "critical"),
        ]

    def test_since_when_it_holds_is_from_before_it_was_found(self, training: Training):
        training.train(300, norm=1e-7)
        (event,) = [e for e in training.events if e.condition.severity == "critical"]
        active = event.condition
        assert active.name == "MpAgentGradientVanishing"
        # Held for two minutes, after the window of the norm had forgotten the healthy ones.
        assert event.step - active.since_step == pytest.approx(120, abs=3)
        assert event.time_unix_seconds - active.since_unix_seconds == pytest.approx(120, abs=3)

    def test_an_incident_says_where_it_began(self, training: Training):
        training.step(loss_nonfinite=1.0, nan_elements=3.0)
        training.train(3, loss_nonfinite=1.0, nan_elements=3.0)
        found = {event.condition.name: event.condition for event in training.events}
        assert set(found) == {UPDATE, "MpAgentLossNonFinite"}
        for active in found.values():
            assert (active.since_step, active.rank, active.phase) == (61, "0", "forward")
            assert "First seen at step 61, rank 0, phase forward." in active.description

    def test_a_run_that_makes_no_step_is_judged_by_the_clock(self, training: Training):
        for _ in range(620):
            training.wait(1.0)
        assert training.heard() == [("firing", "MpAgentRunStalled", "warning")]
        training.step()
        assert training.heard()[1:] == [("resolved", "MpAgentRunStalled", "warning")]

    def test_one_that_listens_and_fails_hurts_no_other(
        self, training: Training, caplog: pytest.LogCaptureFixture
    ):
        def broken(event: ConditionEvent) -> None:
            raise OSError("no disk")

        training.tracker.listeners.insert(0, broken)
        training.step(norm=5_000.0)
        training.step(nan_elements=1.0)
        assert len(training.events) == 2
        failures = [r for r in caplog.records if "failed on a condition" in r.getMessage()]
        assert len(failures) == 1

    def test_a_run_that_cannot_be_read_is_logged_once_and_goes_on(
        self, training: Training, caplog: pytest.LogCaptureFixture, monkeypatch
    ):
        with monkeypatch.context() as patched:
            patched.setattr(training, "export", lambda: 1 / 0)
            training.train(3)
        training.step(norm=5_000.0)
        assert len([r for r in caplog.records if "cannot be judged" in r.getMessage()]) == 1
        assert training.heard() == [("firing", EXPLOSION, "critical")]


class TestSpeed:
    @pytest.fixture(autouse=True)
    def no_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a judgement be followed by a rest that outlasts the test."""
        monkeypatch.setattr(module, "PROCESSOR_SHARE", 1e-9)

    def test_steps_that_come_too_fast_are_judged_together(self, training: Training):
        training.wait(1.0)
        looks = training.looks
        for _ in range(500):
            training.step()
        assert training.looks == looks
        training.wait(0.2)
        assert training.looks == looks + 1
        training.wait(0.2)
        assert training.looks == looks + 1

    def test_an_excursion_among_them_is_found(self, training: Training):
        for step in range(500):
            training.step(norm=5_000.0 if step == 250 else 1.0)
        training.wait(0.2)
        assert training.heard() == [("firing", EXPLOSION, "critical")]

    def test_a_gauge_that_was_extreme_for_one_step_is_found(self, training: Training):
        training.train(3, loss_scale=64.0)
        for step in range(500):
            training.step(loss_scale=0.5 if step == 250 else 64.0)
        training.wait(0.2)
        assert ("firing", "MpAgentLossScaleAtFloor", "critical") in training.heard()


class TestTelling:
    def test_each_event_is_one_line_of_the_log(
        self, training: Training, caplog: pytest.LogCaptureFixture
    ):
        caplog.set_level(logging.INFO, "mp_agent.node")
        training.step(norm=5_000.0)
        (record,) = caplog.records
        line = record.getMessage()
        assert record.levelno == logging.CRITICAL
        assert line.startswith(
            f"condition={EXPLOSION} state=firing severity=critical run=llama step=61 "
            "since_step=61 rank= layer= phase= value=1 description="
        )
        remedy = json.loads(line.split(" remedy=")[1])
        assert remedy.startswith("Clip gradients")

    def test_the_file_for_the_ranks_holds_the_events(self, training: Training, run_dir: Path):
        training.step(norm=5_000.0)
        training.step(nan_elements=1.0)
        news = read_conditions(run_dir)
        assert news is not None
        assert [item.event for item in news.events] == training.events

    def test_a_full_directory_is_logged_once(
        self, training: Training, monkeypatch, caplog: pytest.LogCaptureFixture
    ):
        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module, "write_conditions", full)
        training.step(norm=5_000.0)
        training.step(nan_elements=1.0)
        assert len(training.events) == 2
        assert caplog.text.count("conditions cannot be told to the ranks") == 1

    def test_other_nodes_are_told_while_it_is_news(self, training: Training, tmp_path: Path):
        assert training.tracker.recent_news(training.now_seconds) == b""
        training.step(norm=5_000.0)
        content = training.tracker.recent_news(training.now_seconds + 59)
        assert training.tracker.recent_news(training.now_seconds + 61) == b""

        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        other = Training(elsewhere).tracker
        other.take_over(b"")
        assert not conditions_path(elsewhere).exists()
        other.take_over(content)
        assert read_conditions(elsewhere) == read_conditions(tmp_path)
        before = conditions_path(elsewhere).stat().st_ino
        other.take_over(content)
        assert conditions_path(elsewhere).stat().st_ino == before

    def test_what_the_root_says_may_be_nonsense(
        self, run_dir: Path, caplog: pytest.LogCaptureFixture
    ):
        tracker = Training(run_dir).tracker
        for content in (b"nonsense", b"more nonsense"):
            tracker.take_over(content)
        assert not conditions_path(run_dir).exists()
        assert len(caplog.records) == 1

    def test_both_metrics_exist_for_everything_from_the_start(self, run_dir: Path):
        training = Training(run_dir)
        assert set(training.tracker.fired) == {
            (condition.name, level.severity.value)
            for condition in CONDITIONS
            for level in condition.levels
        }
        view = training.export().view
        for name in ("mp_agent_condition_active", "mp_agent_condition_fired_total"):
            reading = BY_PROMETHEUS_NAME[name].read
            assert reading is not None
            assert reading(view) == dict.fromkeys(training.tracker.fired, 0.0)

    def test_they_show_what_is_in_force_and_how_often_it_began(self, training: Training):
        training.step(norm=5_000.0)
        view = training.export().view
        active = BY_PROMETHEUS_NAME["mp_agent_condition_active"].read(view)
        fired = BY_PROMETHEUS_NAME["mp_agent_condition_fired_total"].read(view)
        assert active[EXPLOSION, "critical"] == 1
        assert sum(active.values()) == 1
        assert fired[EXPLOSION, "critical"] == 1


class TestSuccessor:
    @pytest.fixture
    def succeed(self, run_dir: Path) -> Callable[[Training], Training]:
        """Start the account anew from what a ledger would hold."""

        def start(before: Training) -> Training:
            totals, histograms = before.account.counters.dump()
            return Training(
                run_dir,
                dataclasses.replace(before.tracker.memory),
                counters=CounterBook(totals, histograms),
                progress=before.account.progress,
                sequence=before.sequence,
            )

        return start

    def test_what_is_in_force_goes_on_without_a_new_event(self, training, succeed, run_dir):
        training.step(norm=5_000.0)
        successor = succeed(training)
        successor.train(30)
        assert successor.events == []
        assert {c.severity for c in successor.tracker.active} >= {"critical"}
        assert successor.tracker.fired[EXPLOSION, "critical"] == 1
        successor.train(400)
        assert ("resolved", EXPLOSION, "critical") in successor.heard()
        news = read_conditions(run_dir)
        assert [item.number for item in news.events] == [1, 2]

    def test_what_was_counted_before_is_no_news(self, training, succeed):
        training.step(norm=5_000.0)
        training.train(700)
        successor = succeed(training)
        successor.train(60)
        assert successor.events == []

    def test_what_is_counted_after_it_is(self, training, succeed):
        successor = succeed(training)
        successor.step(norm=5_000.0)
        assert successor.heard() == [("firing", EXPLOSION, "critical")]

    def test_the_memory_is_not_lost_where_the_successor_dies_before_it_judged(
        self, training, succeed
    ):
        training.step(norm=5_000.0)
        assert succeed(training).tracker.memory == training.tracker.memory
