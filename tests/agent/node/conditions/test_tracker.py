"""From closed steps to events, in the account of one run, without rings or processes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mp_agent.alerting.durations import duration
from mp_agent.alerting.values import values_in_force
from mp_agent.node.accounting.accumulator import CounterStore
from mp_agent.node.conditions import tracker as module
from mp_agent.records.conditions import StoredConditionEvent
from mp_agent.ring.run_files import conditions_path, read_conditions
from tests.agent.node.training import EXPLOSION, UPDATE, Training


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
        assert "on 1 step(s) in the last 5m" in active.description
        assert "Clip gradients" in active.remedy and active.summary.endswith(".")

    @pytest.mark.slow
    def test_it_is_over_when_its_window_has_passed(self, training: Training):
        training.step(norm=5_000.0)
        training.train(400)
        assert training.heard()[0] == ("firing", EXPLOSION, "critical")
        assert ("resolved", EXPLOSION, "critical") in training.heard()
        assert training.tracker.active == ()

    def test_what_is_in_force_says_what_is_so_now(self, training: Training):
        for _ in range(5):
            training.step(norm=5_000.0)
        training.train(5)
        (active,) = [c for c in training.tracker.active if c.severity == "critical"]
        assert active.value == 5 and "on 5 step(s)" in active.description
        assert active.since_step == 61

    def test_a_milder_severity_is_muted_but_is_in_force(self, training: Training):
        training.step(norm=5_000.0)
        training.train(30, norm=200.0)
        severities = {c.severity for c in training.tracker.active if c.name == EXPLOSION}
        assert severities == {"critical", "warning"}
        assert training.heard() == [("firing", EXPLOSION, "critical")]
        assert training.tracker.fired[EXPLOSION, "warning"] == 1

    @pytest.mark.slow
    def test_it_is_reported_once_the_worse_one_is_over_and_then_its_end_too(
        self, training: Training
    ):
        training.step(norm=5_000.0)
        training.train(320, norm=200.0)
        assert training.heard() == [
            ("firing", EXPLOSION, "critical"),
            ("resolved", EXPLOSION, "critical"),
            ("firing", EXPLOSION, "warning"),
        ]
        training.train(320)
        assert training.heard()[3:] == [("resolved", EXPLOSION, "warning")]

    @pytest.mark.slow
    def test_small_gradients_are_reported_once_although_noise_looks_like_learning(
        self, training: Training
    ):
        random = Random(3)
        for number in range(300):
            training.wait(40.0)
            norm = 1.0 if number < 150 else 1e-9 * random.uniform(0.8, 1.2)
            training.step(loss=random.gauss(2.0, 0.05), norm=norm)
        heard = [own for own in training.heard() if own[1] == "MpAgentGradientVanishing"]
        assert heard == [("firing", "MpAgentGradientVanishing", "critical")]

    def test_of_one_that_was_never_reported_the_end_is_not_reported_either(
        self, training: Training
    ):
        training.train(800, norm=1e-7)
        vanishing = [c for c in training.tracker.active if c.name == "MpAgentGradientVanishing"]
        assert {c.severity for c in vanishing} == {"critical", "warning"}
        training.train(duration("vanishing_keep").seconds + 10)
        assert training.heard() == [
            ("firing", "MpAgentGradientVanishing", "critical"),
            ("resolved", "MpAgentGradientVanishing", "critical"),
        ]

    @pytest.mark.slow
    def test_since_when_it_holds_is_from_before_it_was_found(self, training: Training):
        training.train(300, norm=1e-7)
        (event,) = [e for e in training.events if e.condition.severity == "critical"]
        active = event.condition
        assert active.name == "MpAgentGradientVanishing"
        # The 60 steps before were healthy.
        steps = values_in_force().limits["grad_norm_vanished_steps"]
        assert (active.since_step, event.step) == (61, 60 + steps)
        assert "since step 61." in active.summary

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
        def broken(event: StoredConditionEvent) -> None:
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
        assert training.looks == looks
        training.wait(0.8)
        assert training.looks == looks + 1

    def test_an_excursion_among_them_is_found(self, training: Training):
        for step in range(500):
            training.step(norm=5_000.0 if step == 250 else 1.0)
        training.wait(1.0)
        assert training.heard() == [("firing", EXPLOSION, "critical")]

    def test_a_gauge_that_was_extreme_for_one_step_is_found(self, training: Training):
        training.train(3, loss_scale=64.0)
        for step in range(500):
            training.step(loss_scale=0.5 if step == 250 else 64.0)
        training.wait(1.0)
        assert ("firing", "MpAgentLossScaleAtFloor", "critical") in training.heard()


class TestSuccessor:
    @pytest.fixture
    def succeed(self, run_dir: Path) -> Callable[[Training], Training]:
        """Rebuild the account from what a ledger would hold."""

        def start(before: Training) -> Training:
            totals, histograms = before.account.counters.dump()
            return Training(
                run_dir,
                dataclasses.replace(before.tracker.memory),
                counters=CounterStore(totals, histograms),
                progress=before.account.progress,
                sequence=before.sequence,
            )

        return start

    @pytest.mark.slow
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
        assert news is not None and [item.number for item in news.events] == [1, 2]

    @pytest.mark.slow
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


JUMP = "MpAgentLearningRateJump"


class TestFirstStep:
    """Of steps that are judged together, the condition names the one that met it."""

    @pytest.fixture(autouse=True)
    def no_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a judgement be followed by a rest that outlasts the test."""
        monkeypatch.setattr(module, "PROCESSOR_SHARE", 1e-9)

    @pytest.fixture
    def begun(self, training: Training) -> int:
        """Return the last step that was judged."""
        training.wait(1.0)
        return int(training.sequence)

    def _since(self, training: Training) -> dict[str, int]:
        training.wait(1.0)
        return {
            event.condition.name: event.condition.since_step
            for event in training.events
            if event.condition.severity == "critical"
        }

    def test_of_a_counter_it_is_the_step_on_which_it_rose(self, training: Training, begun: int):
        for number in range(1, 200):
            training.step(norm=5_000.0 if number >= 130 else 1.0)
        assert self._since(training) == {EXPLOSION: begun + 130}

    def test_of_a_gauge_it_is_the_step_on_which_it_crossed_its_limit(
        self, training: Training, begun: int
    ):
        training.train(3, loss_scale=64.0)
        training.wait(1.0)
        begun = training.sequence
        for number in range(1, 200):
            training.step(loss_scale=64.0 if number < 77 else 0.5, skipped=float(number == 77))
        assert self._since(training)["MpAgentLossScaleAtFloor"] == begun + 77

    def test_of_consecutive_steps_it_is_the_first_of_them(self, training: Training, begun: int):
        limit = values_in_force().limits["untrained_steps"]
        for _ in range(int(limit) + 100):
            training.step(norm=0.0)
        assert self._since(training)["MpAgentNothingTrained"] == begun + 1

    def test_all_conditions_of_a_nan_name_the_same_step(self, training: Training, begun: int):
        for number in range(1, 200):
            bad = float(number >= 70)
            training.step(loss_nonfinite=bad, nan_elements=3 * bad)
        assert self._since(training) == {UPDATE: begun + 70, "MpAgentLossNonFinite": begun + 70}

    def test_an_update_is_not_dated_to_a_loss_that_was_not_finite_before_it(
        self, training: Training, begun: int
    ):
        for number in range(1, 200):
            training.step(loss_nonfinite=float(number >= 20), nan_elements=float(number >= 90))
        assert self._since(training) == {UPDATE: begun + 90, "MpAgentLossNonFinite": begun + 20}

    @pytest.mark.parametrize("apart", [0.0, 1.0], ids=["judged together", "judged one by one"])
    def test_of_a_jump_that_the_loss_had_to_prove_it_is_that_of_the_rate(
        self, training: Training, begun: int, apart: float
    ):
        for number in range(1, 160):
            training.wait(apart)
            lost = {"loss": 40.0} if number >= 133 else {}
            training.step(learning_rate=1e-3 if number < 130 else 0.1, **lost)
        training.wait(1.0)
        jumps = [e.condition for e in training.events if e.condition.name == JUMP]
        assert [jump.since_step for jump in jumps] == [begun + 130]
