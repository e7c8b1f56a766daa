from typing import Any

import pytest

from mp_agent.alerting.durations import duration
from mp_agent.alerting.values import MarkedValues, Severity, check_marks, values_in_force
from mp_agent.catalog.thresholds import BY_NAME, DEFAULTS
from mp_agent.errors import CatalogError, SettingError
from tests.subtests import each


def test_without_overrides_the_defaults_are_in_force() -> None:
    values = values_in_force()
    assert dict(values.limits) == DEFAULTS
    assert values.duration(duration("stall_window")) == "10m"


def test_the_time_scale_multiplies_every_duration_overrides_too() -> None:
    plain = values_in_force()
    scaled = values_in_force(durations={"stall_window": 300}, time_scale=0.1)
    assert scaled.seconds["stall_window"] == pytest.approx(30)
    for name, seconds in plain.seconds.items():
        if name != "stall_window":
            assert scaled.seconds[name] == pytest.approx(seconds * 0.1)
    assert scaled.limits == plain.limits


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
def test_a_time_scale_must_be_above_zero(scale: float) -> None:
    with pytest.raises(SettingError, match="time scale"):
        values_in_force(time_scale=scale)


@pytest.mark.parametrize(
    "overrides",
    [
        {"durations": {"nap": 1}},
        {"durations": {"stall_window": 0}},
        {"durations": {"stall_window": float("nan")}},
        {"thresholds": {"nap": 1}},
        {"selectors": {"nap": ""}},
    ],
)
def test_unknown_names_and_values_of_zero_are_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"nap|stall_window"):
        values_in_force(**overrides)


@pytest.mark.parametrize("text", ["", 'a="b"', 'a="b",c!~"d|e"', r'a=~"x\.\""'])
def test_label_matchers_are_taken_as_they_are(text: str) -> None:
    assert values_in_force(selectors={"series": text}).selectors["series"] == text


@each("text", ["{}", "a", 'a="b', 'a="b"}', 'a="b" or vector(1)', "a='b'"])
def test_what_is_no_label_matcher_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="selectors: series has value"):
        values_in_force(selectors={"series": text})


def test_marks_stand_for_every_number_in_every_text() -> None:
    plain = values_in_force()
    marked = MarkedValues(plain.limits, plain.seconds)
    stall, end = duration("stall_window"), duration("end_window")
    assert marked.duration(stall, end) == "@stall_window+end_window@"
    assert marked.length_text(stall) == "@stall_window#@"
    assert marked.limit_text(BY_NAME["grad_norm_high"]) == "@grad_norm_high@"
    assert marked.bound_text(BY_NAME["grad_norm_high"]) == "@grad_norm_high@"
    assert marked.fill("<grad_norm_high> in <stall_window>") == "@grad_norm_high@ in @stall_window@"


def test_a_level_has_its_own_severity_unless_it_was_changed_or_turned_off() -> None:
    changed = {"MpAgentX": {Severity.WARNING: Severity.INFO, Severity.CRITICAL: None}}
    values = values_in_force(severities=changed)
    assert values.severity("MpAgentX", Severity.WARNING) is Severity.INFO
    assert values.severity("MpAgentX", Severity.CRITICAL) is None
    assert values.severity("MpAgentX", Severity.INFO) is Severity.INFO
    assert values.severity("MpAgentY", Severity.CRITICAL) is Severity.CRITICAL


def test_marks_are_filled_with_the_values_in_force() -> None:
    values = values_in_force({"grad_norm_high": 50}, time_scale=0.5)
    assert values.fill("above <grad_norm_high> in <explosion_window>, {{ $value }}") == (
        "above 50 in 2m30s, {{ $value }}"
    )


def test_a_mark_that_names_nothing_is_refused() -> None:
    check_marks("MpAgentX", "<stall_window>")
    with pytest.raises(CatalogError, match="MpAgentX: <nap>"):
        check_marks("MpAgentX", "for <nap>")
