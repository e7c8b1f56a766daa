import logging
from typing import Any

import pytest

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.durations import DURATIONS
from mp_agent.alerting.site import known_names, site_values, usable_values
from mp_agent.alerting.values import SELECTORS, Severity, values_in_force
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.errors import SettingError
from mp_agent.settings import Settings
from tests.subtests import each

_C, _W, _I = Severity.CRITICAL, Severity.WARNING, Severity.INFO


def test_without_anything_set_the_defaults_are_in_force() -> None:
    assert site_values() == values_in_force()
    assert site_values(Settings()) == values_in_force()


def test_assignments_are_told_apart_by_name() -> None:
    texts = ("grad_norm_high=50", "stall_window = 1m30s", "end_window=7", 'selectors.series=a="b"')
    values = site_values(None, texts)
    assert values.limits["grad_norm_high"] == 50
    assert (values.seconds["stall_window"], values.seconds["end_window"]) == (90, 7)
    assert values.selectors == {**SELECTORS, "series": 'a="b"'}


def test_the_settings_apply_and_later_assignments_win() -> None:
    settings = Settings(
        thresholds={"grad_norm_high": 50.0, "grad_norm_low": 0.02},
        alerts={"stall_window": "20m", "MpAgentLossSpike": "off"},
    )
    values = site_values(settings, ("grad_norm_high=60", "MpAgentLossSpike.warning=info"))
    assert values.limits["grad_norm_high"] == 60
    assert values.limits["grad_norm_low"] == 0.02
    assert values.seconds["stall_window"] == 1200
    assert values.severity("MpAgentLossSpike", _W) is _I


@each(
    ("text", "alert", "severities"),
    [
        ("MpAgentLossSpike.severity=info", "MpAgentLossSpike", {_W: _I}),
        ("MpAgentLossSpike.warning=critical", "MpAgentLossSpike", {_W: _C}),
        ("MpAgentLossSpike=off", "MpAgentLossSpike", {_W: None}),
        ("MpAgentLossSpike.severity=off", "MpAgentLossSpike", {_W: None}),
        (
            "MpAgentGradientExplosion.info=off",
            "MpAgentGradientExplosion",
            {_C: _C, _W: _W, _I: None},
        ),
        (
            "MpAgentGradientExplosion=off",
            "MpAgentGradientExplosion",
            {_C: None, _W: None, _I: None},
        ),
    ],
)
def test_a_severity_can_be_changed_and_an_alert_turned_off(
    text: str, alert: str, severities: dict[Severity, Severity | None]
) -> None:
    values = site_values(None, (text,))
    assert {own: values.severity(alert, own) for own in severities} == severities


_WRONG = [
    ("grad_norm_high", "'grad_norm_high' sets nothing; write NAME=VALUE"),
    ("nap=1", "'nap' is unknown; known: grad_norm_high"),
    ("MpAgentNap=off", "'MpAgentNap' is unknown"),
    ("grad_norm_high=much", "grad_norm_high has value 'much'; it must be a number"),
    ("grad_norm_high=-3", "grad_norm_high has value -3.0; it must be above 0"),
    ("overflow_warning=5", "overflow_warning has value 5.0; it is a share, at most 1"),
    ("overflow_warning=5%", "overflow_warning has value '5%'; it must be a number"),
    ("grad_norm_high=10m", "grad_norm_high has value '10m'; it must be a number"),
    ("stall_window=x", "stall_window has value 'x'; give seconds"),
    ("stall_window=-5", "stall_window has value '-5'; give seconds"),
    ("stall_window=0", "stall_window has value 0.0; it must be above 0"),
    ("selectors.nap=a", "selectors: 'nap' is unknown; known: series, targets"),
    ("selectors.series=a", "selectors: series has value 'a'"),
    ("MpAgentLossSpike=info", "MpAgentLossSpike has value 'info'; only off is for the whole"),
    ("MpAgentLossSpike.severity=loud", "has value 'loud'; it must be one of critical, warning"),
    ("MpAgentLossSpike.critical=off", "MpAgentLossSpike.critical is unknown; .* has warning"),
    ("MpAgentGradientExplosion.severity=info", "is unknown; .* has critical, warning, info"),
    ("MpAgentGradientExplosion.critical=info", "turn one of them off"),
]


@each(("text", "message"), _WRONG)
def test_what_cannot_be_had_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        site_values(None, (text,))


def test_two_levels_can_change_places_if_one_is_off() -> None:
    texts = ("MpAgentGradientExplosion.critical=info", "MpAgentGradientExplosion.info=off")
    assert site_values(None, texts).severity("MpAgentGradientExplosion", _C) is _I


@pytest.mark.parametrize(
    "text", [t for t, _ in _WRONG if "=" in t and t.partition("=")[0] not in DEFAULTS]
)
def test_a_node_agent_ignores_what_is_wrong_and_says_so(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, _, value = text.partition("=")
    settings = Settings(alerts={"end_window": "7", name: value})
    with caplog.at_level(logging.WARNING):
        values, ignored = usable_values(settings)
    assert ignored == 1
    assert name.removeprefix("selectors.") in caplog.text
    assert values == values_in_force(durations={"end_window": 7.0})


def test_numbers_and_the_off_of_yaml_are_texts_too() -> None:
    alerts: dict[str, Any] = {"stall_window": 600, "MpAgentLossSpike": False}
    values = site_values(Settings(alerts=alerts))
    assert values.seconds["stall_window"] == 600
    assert values.severity("MpAgentLossSpike", _W) is None


def test_all_names_are_reported() -> None:
    expected = {*DEFAULTS, *(d.name for d in DURATIONS), *(c.name for c in CONDITIONS)}
    assert set(known_names()) == expected | {"selectors.series", "selectors.targets"}
