"""A post-mortem judges by the limits that its run's alerts judged by."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from mp_agent import flight
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.durations import DURATIONS
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.errors import SettingError
from mp_agent.flight.postmortem.diagnosis import Causes
from mp_agent.flight.record.evidence import gather, recorded_values, with_assignments
from mp_agent.node.flight.job import make_record
from mp_agent.records.steps import EndReason, Phase
from mp_agent.settings import Settings
from tests.agent.flight.builders import (
    calm,
    findings_of,
    layers,
    make_log,
    make_node_record,
    make_segment,
    overflow,
)
from tests.agent.node.builders import merged_step
from tests.subtests import each

SOURCES = Path(next(iter(flight.__path__)))


EARLY = (5, 6, 7, 8, 9)
"""Samples that show what is usual of a layer."""


def samples(early: dict[str, float], late: dict[str, float], count: int = 1):
    """Return samples of layers, of which the first one changes after the early ones."""
    usual = {"elements": 100.0, "abs_max": 1.0, "sum_squares": 1.0}
    rest = {f"layer{index}": {**usual, **early} for index in range(1, count)}
    return [
        layers(at, {"layer": {**usual, **(early if at in EARLY else late)}, **rest})
        for at in (*EARLY, 20, 30, 40)
    ]


def dying(largest: float):
    return samples({}, {"abs_max": largest, "sum_squares": largest**2}, 3)


def emptying(zeros: float, count: int = 1):
    return samples({"zero_elements": 0.0}, {"zero_elements": zeros}, count)


def falling(count: int, factor: float = 2.0):
    """Return a run whose scale falls by a factor with each of `count` skipped steps."""
    steps = calm(550, loss_scale=65536.0)
    for n in range(count):
        steps.append(overflow(551 + 10 * n, 65536.0 / factor**n))
        steps += calm(9, first=552 + 10 * n, loss_scale=65536.0 / factor ** (n + 1))
    return steps


def fallen(count: int, factor: float = 4.0):
    """Return a run whose scale falls by a factor three times, and then stays for `count` steps."""
    steps = falling(3, factor)
    return steps + calm(count, first=len(steps) + 1, loss_scale=65536.0 / factor**3)


def vanished(count: int):
    return [*calm(60), *calm(count, first=61, norm=1e-7)]


FALLEN = [*calm(60), *calm(1800, first=61, norm=0.05)]
"""A norm that is low for as many steps as the mildest level takes."""

CASES = [
    ("gradient_underflow", "layer_dead_abs_max=1e-7", calm(60), dying(1e-8)),
    ("gradient_underflow", "layer_dead_samples=2", calm(60), dying(1e-11)[:-1]),
    ("gradient_underflow", "layer_zero_rise=0.05", calm(60), emptying(15.0)),
    ("gradient_underflow", "underflow_layers=0.02", calm(60), emptying(90.0, 30)),
    ("gradient_explosion", "grad_norm_high=50", [*calm(60), *calm(9, first=61, norm=80.0)], []),
    ("gradient_vanishing", "grad_norm_low=0.1", FALLEN, []),
    ("gradient_vanishing", "grad_norm_vanished_steps=60", vanished(100), []),
    ("loss_scale_falling", "loss_scale_decreases_in_row=2", falling(2), []),
    ("loss_scale_collapse", "loss_scale_share_of_initial=0.1", fallen(250), []),
    ("loss_scale_collapse", "loss_scale_share_of_initial_steps=60", fallen(100, 7.0), []),
    ("learning_rate_jump", "learning_rate_jump=4", None, []),
]


def five_fold_rate():
    return [
        merged_step(n, norm=1.0, loss=2.0, learning_rate=1e-3 * (1 - n / 1e4) if n < 150 else 5e-3)
        for n in range(1, 200)
    ]


@each(("cause", "assignment", "steps", "tables"), CASES)
def test_a_limit_that_is_set_decides_what_is_found(cause, assignment, steps, tables):
    steps = five_fold_rate() if steps is None else steps
    assert cause not in findings_of(steps, tables)
    values = with_assignments(values_in_force(), [assignment])
    assert cause in findings_of(steps, tables, values=values)


def test_a_stall_is_one_from_the_alerts_own_window_on():
    ranks = [
        make_log(0, end=EndReason.RUNNING, phase=Phase.BACKWARD, state={"phase_unix_ns": 10**12})
    ]
    values = with_assignments(values_in_force(), ["rank_stall_window=20m"])

    def found(silence_seconds: float, values=None):
        read = 1000.0 + silence_seconds
        return findings_of(
            calm(60, step_seconds=0.1), ranks=ranks, read_unix_seconds=read, values=values
        )

    assert list(found(301.0)) == ["rank_stalled"] and found(299.0) == {}
    assert list(found(1201.0, values)) == ["rank_stalled"] and found(1199.0, values) == {}


def test_the_floor_in_a_text_is_the_one_that_was_set():
    steps = calm(550, loss_scale=65536.0) + [overflow(551 + n, 2.0 ** (16 - n)) for n in range(16)]
    values = with_assignments(values_in_force(), ["loss_scale_floor=4"])
    finding = findings_of(steps, values=values)["loss_scale_collapse"]
    assert finding.arguments_for[0].text.startswith("2 step(s) were skipped at a scale of 4 or")


def test_a_record_carries_what_the_settings_say_of_alerts_and_the_analysis_uses_it():
    log = make_log(segments=(make_segment(),))
    settings = Settings(
        thresholds={"grad_norm_low": 0.005},
        alerts={"grad_norm_high": "50", "rank_stall_window": "20m", "MpAgentLossSpike": "off"},
        time_scale=0.5,
    )
    record = make_record(make_node_record().request, (log,), settings)
    assert record.thresholds["grad_norm_high"] == 50.0
    evidence = gather(Path("record"), [record])
    assert evidence is not None
    expected = {**DEFAULTS, "grad_norm_low": 0.005, "grad_norm_high": 50.0}
    assert evidence.values.limits == expected
    assert evidence.values.seconds["rank_stall_window"] == 600.0


def test_a_record_of_another_release_is_read_nevertheless():
    thresholds = {**DEFAULTS, "grad_norm_high": 5e6, "unheard_of": 1.0}
    values = recorded_values(thresholds, {"alerts": "nonsense", "time_scale": None})
    assert values.limits == {**DEFAULTS, "grad_norm_high": 5e6}
    for scale in (0, -1.0, 1e308, 10**400):
        assert recorded_values({}, {"time_scale": scale}).time_scale == 1.0
    record = replace(make_node_record(), thresholds={})
    evidence = gather(Path("record"), [record])
    assert evidence is not None and evidence.values.limits == DEFAULTS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("grad_norm_high", "'grad_norm_high' sets nothing; write NAME=VALUE"),
        ("grad_norm_hihg=1", "'grad_norm_hihg' is unknown"),
        ("grad_norm_high=much", "grad_norm_high has value 'much'"),
        ("grad_norm_high=2000", "it must be below grad_norm_extreme"),
    ],
)
def test_an_assignment_that_is_invalid_is_refused_by_name(text, problem):
    with pytest.raises(SettingError, match=problem):
        with_assignments(values_in_force(), [text])


@each("cause", Causes)
def test_every_alert_that_a_cause_cites_exists(cause):
    assert set(cause.value.conditions) <= {condition.name for condition in CONDITIONS}


def test_every_limit_that_is_asked_for_exists():
    """A name that is wrong would be met only in the run that needs it."""
    names: dict[str, set[str]] = {"limit": set(), "seconds": set()}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                for argument in node.args:
                    if node.func.attr in names and isinstance(argument, ast.Constant):
                        assert isinstance(argument.value, str)
                        names[node.func.attr].add(argument.value)
    assert len(names["limit"]) > 3 and names["seconds"] == {"rank_stall_window"}
    assert names["limit"] <= set(DEFAULTS)
    assert names["seconds"] <= {duration.name for duration in DURATIONS}


@pytest.mark.parametrize(("first", "found"), [(1, False), (5001, True)])
def test_the_warm_up_is_that_of_the_run_and_not_of_the_record(first, found):
    steps = [
        merged_step(
            n, norm=1.0, loss=2.0 + n % 7 / 100, learning_rate=1e-3 if n < first + 50 else 1.0
        )
        for n in range(first, first + 90)
    ]
    assert ("learning_rate_jump" in findings_of(steps)) == found
