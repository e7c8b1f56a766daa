"""A log is judged as the run was: what fires, since which step, and what stays blind."""

from math import inf, nan
from pathlib import Path
from unittest.mock import patch

import pytest

from mp_agent.alerting.site import site_values
from mp_agent.alerting.values import values_in_force
from mp_agent.backtest.log.training_log import Point
from mp_agent.backtest.past_runs import play
from mp_agent.backtest.results import RunResult
from mp_agent.node.conditions import tracker
from tests.agent.backtest.builders import broken_points, healthy_points, log_of
from tests.agent.node.training import Training

UPDATE, LOSS = "MpAgentNonFiniteUpdate", "MpAgentLossNonFinite"


def judged(points, **options) -> RunResult:
    facts = {key: options.pop(key) for key in ("name", "clip_max_norm") if key in options}
    return play(log_of(points, **facts), options.pop("values", values_in_force()), **options)


def alerts(result: RunResult) -> dict[str, str]:
    return {alert.name: alert.severity for alert in result.alerts}


def test_a_healthy_run_brings_nothing() -> None:
    result = judged(healthy_points(400))
    assert result.alerts == ()
    assert (result.points, result.first_step, result.last_step) == (400, 1, 400)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 500])
def test_a_run_that_turns_nan_is_reported_at_the_step_at_which_it_did(every: int) -> None:
    result = judged(broken_points(300, 201, every=every))
    found = {alert.name: alert for alert in result.alerts}
    assert found.keys() >= {UPDATE, LOSS}
    for name in (UPDATE, LOSS):
        assert found[name].severity == "critical"
        assert found[name].first_step == 201 * every
        assert found[name].fired_point == 200
        assert found[name].ongoing
        assert found[name].last_step == 300 * every
    # Counted at the first such step.
    assert found[LOSS].value == 1.0 and found[LOSS].value_step == 201 * every


def test_an_alert_lasts_as_long_as_its_window_however_sparse_the_log() -> None:
    """One spiking explosion at minute 100; the window of five minutes is over between points."""
    points = healthy_points(100, every=600)
    points[50] = Point(step=points[50].step, loss=1.0, grad_norm=1e6, learning_rate=1e-3)
    points[51] = Point(step=points[51].step, loss=1.0, grad_norm=1e6, learning_rate=1e-3)
    (alert,) = (a for a in judged(points).alerts if a.name == "MpAgentGradientExplosion")
    assert alert.severity == "critical"
    assert not alert.ongoing
    window_seconds = values_in_force().seconds["explosion_window"]
    assert alert.duration_seconds < 600 + window_seconds + 30
    assert alert.times >= 1


@pytest.mark.slow
def test_two_times_of_one_condition_are_one_alert() -> None:
    points = healthy_points(4000)
    for place in (1000, 3000):
        points[place] = Point(step=place + 1, loss=nan, grad_norm=1.0, learning_rate=1e-3)
    (alert,) = (a for a in judged(points).alerts if a.name == LOSS)
    assert (alert.times, alert.first_step, alert.ongoing) == (2, 1001, False)
    assert alert.spans[1][0] == 3001
    window_seconds = values_in_force().seconds["incident_window"]
    assert alert.duration_seconds == pytest.approx(2 * window_seconds, abs=60)


def test_isolated_overflows_of_a_scaler_are_routine() -> None:
    points = healthy_points(600, loss_scale=65536.0)
    points[300] = Point(step=301, loss=1.0, grad_norm=inf, learning_rate=1e-3, loss_scale=65536.0)
    assert alerts(judged(points)) == {}


def test_settings_reach_the_conditions() -> None:
    points = healthy_points(400)
    points[200] = Point(step=201, loss=1.0, grad_norm=50.0, learning_rate=1e-3)
    points[201] = Point(step=202, loss=1.0, grad_norm=50.0, learning_rate=1e-3)
    assert alerts(judged(points)) == {}
    values = site_values(None, ("grad_norm_high=20", "grad_norm_extreme=40"))
    assert alerts(judged(points, values=values)) == {"MpAgentGradientExplosion": "critical"}
    off = site_values(
        None, ("grad_norm_high=20", "grad_norm_extreme=40", "MpAgentGradientExplosion=off")
    )
    assert alerts(judged(points, values=off)) == {}


@pytest.mark.slow
def test_what_is_counted_in_steps_is_found_on_the_same_step_at_any_step_time() -> None:
    """A norm of nearly nothing has to last for so many steps, not for a time."""
    points = [
        Point(step=n, loss=2.0 + n % 5 / 50, grad_norm=1.0 if n < 100 else 1e-8)
        for n in range(1, 1000)
    ]
    steps = values_in_force().limits["grad_norm_vanished_steps"]
    for step_seconds in (0.5, 10.0, 60.0):
        result = judged(points, step_seconds=step_seconds)
        (found,) = (a for a in result.alerts if "Vanishing" in a.name)
        assert found.severity == "critical"
        assert (found.first_step, found.fired_step) == (100, 99 + steps)


def test_steps_that_train_nothing_begin_with_the_first_row_of_them() -> None:
    points = [
        Point(step=5 * n, loss=0.0 if n > 100 else 1.0 + n % 5 / 50, grad_norm=1.0)
        for n in range(1, 400)
    ]
    (found,) = (a for a in judged(points).alerts if a.name == "MpAgentNothingTrained")
    assert found.first_step == 505


def test_a_resumed_run_restarts_its_own_past() -> None:
    high = [Point(step=n, loss=9.0 + n % 5 / 20, grad_norm=40.0) for n in range(1, 80)]
    low = [Point(step=n, loss=1.0 + n % 5 / 50, grad_norm=0.5) for n in range(1000, 1300)]
    assert alerts(judged([*low, *high])) == {}


@pytest.mark.slow
def test_a_norm_that_was_not_logged_is_no_gradient_of_zero() -> None:
    points = [Point(step=n, loss=2.0 + n % 7 / 10) for n in range(1, 3000)]
    assert alerts(judged(points, step_seconds=10.0)) == {}


def test_values_beyond_reason_are_judged_without_an_error(caplog) -> None:
    extremes = (0.0, -0.0, 5e-324, 1.8e308, -1.8e308, inf, -inf, nan)
    points = [
        Point(step=n, loss=value, grad_norm=value, learning_rate=1e-3, loss_scale=value)
        for n, value in enumerate(extremes * 20, start=1)
    ]
    assert judged(points).points == len(points)
    assert caplog.records == []


def test_one_point_is_a_log_too() -> None:
    assert judged([Point(step=7, loss=1.0)]).points == 1


def test_what_a_log_lacks_is_noted_and_not_judged() -> None:
    result = judged([Point(step=n, grad_norm=1.0) for n in range(1, 100)])
    blind = {spot.name: spot.reason for spot in result.blind}
    assert blind[LOSS] == "the log does not hold the loss"
    assert "the loss scale" in blind["MpAgentLossScaleLow"]
    assert blind["MpAgentRunStalled"].startswith("the log does not hold when the run paused")
    assert "MpAgentGradientExplosion" not in blind


def test_a_log_that_is_too_short_for_a_usual_level_says_so() -> None:
    blind = {spot.name: spot.reason for spot in judged(healthy_points(20)).blind}
    assert blind["MpAgentLossSpike"] == (
        "the log holds 20 losses; a usual level needs more than 64"
    )


SERIES = {
    "healthy": healthy_points(300),
    "broken": broken_points(300, 201),
    "exploding": [
        Point(step=n, loss=2.0, grad_norm=1.0 if n < 200 else 5000.0, learning_rate=1e-3)
        for n in range(1, 301)
    ],
    "nothing": [Point(step=n, loss=0.0, grad_norm=0.0) for n in range(1, 301)],
    "jump": [
        Point(step=n, loss=2.0 if n < 200 else 5.0, grad_norm=1.0,
              learning_rate=1e-4 if n < 200 else 1e-2)
        for n in range(1, 301)
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SERIES)
def test_the_same_alerts_at_the_same_steps_as_in_the_node_agent(name: str, tmp_path: Path):
    """The node agent's own tracker, judging after each step, is the reference."""
    seconds = 2.0
    with patch.object(tracker, "PROCESSOR_SHARE", 1.0):
        live = Training(tmp_path)
        for point in SERIES[name]:
            live.now_seconds += seconds
            live.step(**_columns(point))
    live_steps = {
        (event.condition.name, event.condition.severity): event.step
        for event in reversed(live.events)
        if event.state == "firing"
    }
    result = judged(SERIES[name], step_seconds=seconds)
    scrape_steps = 15 / seconds
    for alert in result.alerts:
        assert abs(live_steps[alert.name, alert.severity] - alert.value_step) <= scrape_steps
    assert {alert.name for alert in result.alerts} == {name for name, _ in live_steps}


def _columns(point: Point) -> dict[str, float]:
    """Return what the probe would have recorded of a point."""
    broken = point.grad_norm != point.grad_norm
    columns = {
        "skipped": 0.0,
        "step_seconds": 2.0,
        "norm": 1.0 if broken else point.grad_norm or 0.0,
        "nan_elements": float(broken),
    }
    if point.loss is not None and point.loss == point.loss:
        columns["loss"] = point.loss
    else:
        columns |= {"loss": nan, "loss_nonfinite": 1.0}
    if point.learning_rate is not None:
        columns["learning_rate"] = point.learning_rate
    return columns
