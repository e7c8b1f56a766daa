import pytest

from mp_agent.alerting.durations import duration
from mp_agent.alerting.values import check_marks, parse_assignments, values_in_force
from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.errors import CatalogError, SettingError


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


def test_assignments_are_told_apart_by_name() -> None:
    assert parse_assignments(("grad_norm_high=50", "stall_window = 1m30s", "end_window=7")) == (
        {"grad_norm_high": 50.0},
        {"stall_window": 90.0, "end_window": 7.0},
    )


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("grad_norm_high", "'grad_norm_high' sets nothing"),
        ("nap=1", "'nap' is unknown"),
        ("grad_norm_high=much", "grad_norm_high has value 'much'"),
        ("stall_window=x", "stall_window has value 'x'"),
    ],
)
def test_a_wrong_assignment_is_refused_with_its_text(text: str, culprit: str) -> None:
    with pytest.raises(SettingError, match=culprit):
        parse_assignments((text,))


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
def test_a_time_scale_must_be_above_zero(scale: float) -> None:
    with pytest.raises(SettingError, match="time scale"):
        values_in_force(time_scale=scale)


@pytest.mark.parametrize(
    "overrides",
    [{"durations": {"nap": 1}}, {"durations": {"stall_window": 0}}, {"thresholds": {"nap": 1}}],
)
def test_unknown_names_and_values_of_zero_are_refused(
    overrides: dict[str, dict[str, float]],
) -> None:
    with pytest.raises(SettingError, match=r"nap|stall_window"):
        values_in_force(**overrides)


def test_marks_are_filled_with_the_values_in_force() -> None:
    values = values_in_force({"grad_norm_high": 50}, time_scale=0.5)
    assert values.fill("above <grad_norm_high> in <explosion_window>, {{ $value }}") == (
        "above 50 in 2m30s, {{ $value }}"
    )


def test_a_mark_that_names_nothing_is_refused() -> None:
    check_marks("MpAgentX", "<stall_window>")
    with pytest.raises(CatalogError, match="MpAgentX: <nap>"):
        check_marks("MpAgentX", "for <nap>")
