"""When a finding begins and ends, with conditions made for the purpose."""

import dataclasses
import logging
from typing import Any

import pytest

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.loss import LOSS_SPIKE
from mp_agent.alerting.detector import detector as module
from mp_agent.alerting.detector.detector import Detector
from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.expressions import Compare, Count, Number, Predicate, Series, Signal, all_of
from mp_agent.alerting.values import Severity, values_in_force
from mp_agent.catalog.metrics import run, training

LOSS = run.LOSS.prometheus_name
PHASE = run.PHASE.prometheus_name
TWO_MINUTES = duration("restart_hold")
HIGH = Compare(Series(metric=run.LOSS), ">", Number(3))


def condition_of(
    when: Predicate = HIGH,
    *,
    hold: Duration | None = None,
    keep: Duration | None = None,
    severity: Severity = Severity.WARNING,
) -> Condition:
    level = Level(
        severity=severity, when=when, description="It is {value|number}.", hold=hold, keep=keep
    )
    return Condition(
        name="MpAgentSomethingWrong",
        summary="Something is wrong.",
        meaning="It hurts.",
        confirm="Look.",
        remedies=("Stop.",),
        why="It helps.",
        levels=(level,),
        quiet=("good",),
        needs=((Quantity.LOSS,),),
        guidance=LOSS_SPIKE.guidance,
    )


def changes(detector: Detector, losses: dict[float, float]) -> dict[float, list[bool]]:
    """Return what each reading of the loss changes, where it does: True for a new finding."""
    found = {}
    for now_seconds, loss in losses.items():
        detector.readings.update([((LOSS, ()), loss)], now_seconds)
        if seen := [
            change.firing for change in detector.evaluate(now_seconds, round(now_seconds) + 1)
        ]:
            found[now_seconds] = seen
    return found


class TestTimes:
    def test_without_hold_and_keep_it_comes_and_goes_at_once(self):
        detector = Detector([condition_of()], values_in_force())
        assert changes(detector, {0: 1, 1: 9, 2: 9, 3: 1}) == {1: [True], 3: [False]}

    def test_it_must_hold_all_the_time(self):
        detector = Detector([condition_of(hold=TWO_MINUTES)], values_in_force())
        assert changes(detector, {0: 9, 119: 9, 120: 9}) == {120: [True]}
        detector = Detector([condition_of(hold=TWO_MINUTES)], values_in_force())
        assert changes(detector, {0: 9, 60: 1, 61: 9, 120: 9, 180: 9, 181: 9}) == {181: [True]}

    def test_it_is_kept_for_a_while_and_goes_on_if_it_comes_back(self):
        detector = Detector([condition_of(keep=TWO_MINUTES)], values_in_force())
        losses: dict[float, float] = {0: 9, 1: 1, 100: 9, 101: 1, 220: 1, 221: 1, 300: 1}
        assert changes(detector, losses) == {0: [True], 221: [False]}

    def test_what_has_not_held_for_long_enough_is_not_kept(self):
        detector = Detector([condition_of(hold=TWO_MINUTES, keep=TWO_MINUTES)], values_in_force())
        assert changes(detector, {0: 9, 1: 1, 120: 9}) == {}

    def test_all_times_follow_the_time_scale(self):
        detector = Detector([condition_of(hold=TWO_MINUTES)], values_in_force(time_scale=0.5))
        assert changes(detector, {0: 9, 59: 9, 60: 9}) == {60: [True]}


class TestFindings:
    def test_says_what_since_when_and_the_latest_value(self):
        detector = Detector([condition_of(hold=TWO_MINUTES)], values_in_force())
        changes(detector, {0: 9, 120: 8})
        (found,) = detector.findings
        assert (found.condition.name, found.severity) == ("MpAgentSomethingWrong", "warning")
        assert (found.since_seconds, found.since_step) == (0, 1)
        assert (found.value, found.labels) == (8, {})
        changes(detector, {121: 7})
        assert detector.findings[0].value == 7

    def test_each_value_of_a_kept_label_is_a_finding(self):
        when = Compare(Series(metric=run.PHASE, keep=("phase",)), ">", Number(0))
        detector, reported = Detector([condition_of(when)], values_in_force()), []
        for now_seconds, phases in ((0, "ab"), (1, "bc"), (181, "bc")):
            readings = [((PHASE, (("phase", phase),)), 1.0) for phase in phases]
            detector.readings.update(readings, now_seconds)
            found = [(c.firing, c.finding.labels["phase"]) for c in detector.evaluate(now_seconds)]
            reported.append(found)
        # What ends is kept for as long as a failed scrape may hide it.
        assert reported == [[(True, "a"), (True, "b")], [(True, "c")], [(False, "a")]]
        assert [finding.labels for finding in detector.findings] == [{"phase": "b"}, {"phase": "c"}]

    def test_their_number_is_bounded(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(module, "FINDINGS_PER_LEVEL", 3)
        when = Compare(Series(metric=run.PHASE, keep=("phase",)), ">", Number(0))
        detector = Detector([condition_of(when)], values_in_force())
        detector.readings.update([((PHASE, (("phase", str(i)),)), 1.0) for i in range(9)], 0.0)
        assert len(detector.evaluate(0.0)) == 3

    def test_a_value_that_is_not_finite_is_no_finding(self):
        when = Compare(Series(metric=run.LOSS) * Number(1e308), ">", Number(0))
        detector = Detector([condition_of(when)], values_in_force())
        assert changes(detector, {0: 1e300}) == {}


class TestSettings:
    def test_a_severity_may_be_changed_or_switched_off(self):
        conditions = [condition_of()]
        for severity, levels in (
            (Severity.INFO, [("MpAgentSomethingWrong", "info")]),
            (None, []),
        ):
            changed = {"MpAgentSomethingWrong": {Severity.WARNING: severity}}
            detector = Detector(conditions, values_in_force(severities=changed))
            assert detector.levels == levels

    def test_a_period_is_a_24th_of_the_shortest_window(self):
        count = Count(metric=training.SKIPPED_STEPS, window=TWO_MINUTES)
        longer = Series(metric=run.LOSS, over=("max_over_time", duration("stall_window")))
        when = all_of(Compare(count, ">", Number(0)), Compare(longer, ">", Number(0)))
        assert Detector([condition_of(when)], values_in_force()).readings.period_seconds == 5.0


class TestTrouble:
    def test_a_level_that_fails_is_logged_once_and_hurts_no_other(
        self, caplog: pytest.LogCaptureFixture
    ):
        caplog.set_level(logging.ERROR)
        good = dataclasses.replace(condition_of(), name="MpAgentOtherThing")
        detector = Detector([condition_of(), good], values_in_force())

        def fail(moment: Any) -> Any:
            raise ArithmeticError

        detector._watches[0].evaluate = fail
        assert changes(detector, {0: 9, 1: 9}) == {0: [True]}
        (record,) = caplog.records
        assert "MpAgentSomethingWrong (warning) cannot be judged" in record.getMessage()

    def test_a_record_that_cannot_be_interpreted_is_refused(self):
        class Unheard(Signal):
            pass

        with pytest.raises(Exception, match="Unheard has no interpreter"):
            Detector([condition_of(all_of(HIGH, Compare(Unheard(), ">", Number(0))))],
                     values_in_force())  # fmt: skip


class TestAValueThatCountsSteps:
    """A level that holds from some count of consecutive steps on began with the first of them."""

    @staticmethod
    def since(steps: list[int], value: float) -> int:
        """Judge once, after the last of the steps."""
        level = dataclasses.replace(condition_of().levels[0], counts_steps=True)
        condition = dataclasses.replace(condition_of(), levels=(level,))
        detector = Detector([condition], values_in_force())
        for step in steps[:-1]:
            detector.readings.update_some([], float(step), step)
        now_seconds = float(steps[-1])
        detector.readings.update([((LOSS, ()), value)], now_seconds, steps[-1])
        (change,) = detector.evaluate(now_seconds, steps[-1])
        return change.finding.since_step

    def test_begins_with_the_first_of_them(self):
        assert self.since(list(range(1, 66)), 64.0) == 2

    def test_of_a_log_with_one_row_in_five_the_rows_are_counted(self):
        assert self.since(list(range(5, 1000, 5)), 10.0) == 950

    def test_steps_of_an_earlier_attempt_are_not_counted(self):
        assert self.since([*range(1, 50), *range(30, 41)], 11.0) == 30

    def test_steps_from_before_the_agent_began_are_counted_as_one_each(self):
        assert self.since([100, 101, 102], 64.0) == 39
        assert self.since([3, 4], 64.0) == 1


class TestTakingUp:
    def test_a_finding_of_before_lasts_for_as_long_as_its_level_looks_back(self):
        count = Count(metric=training.SKIPPED_STEPS, window=TWO_MINUTES)
        condition = condition_of(all_of(Compare(count, ">", Number(0)), HIGH))
        detector = Detector([condition], values_in_force())
        found = detector.restore(
            "MpAgentSomethingWrong", "warning", {}, 4.0, step=7, now_seconds=0.0
        )
        assert found is not None and found.value == 4.0
        assert changes(detector, {0: 1, 119: 1, 120: 1}) == {120: [False]}

    def test_it_goes_on_without_starting_over(self):
        detector = Detector([condition_of()], values_in_force())
        detector.restore("MpAgentSomethingWrong", "warning", {}, 4.0, step=7, now_seconds=0.0)
        assert changes(detector, {0: 9, 1: 9, 2: 1}) == {2: [False]}

    def test_what_is_not_known_any_more_is_let_go(self):
        detector = Detector([condition_of()], values_in_force())
        assert (
            detector.restore("MpAgentSomethingWrong", "critical", {}, 4.0, step=7, now_seconds=0.0)
            is None
        )
        assert detector.findings == []
