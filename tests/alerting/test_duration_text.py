import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_agent.alerting.durations import parse_seconds, prometheus_duration
from mp_agent.errors import SettingError
from tests.subtests import each


@each(
    ("seconds", "text"),
    [
        (0.25, "250ms"),
        (10, "10s"),
        (90, "1m30s"),
        (600, "10m"),
        (7200, "2h"),
        (5400.5, "1h30m500ms"),
    ],
)
def test_a_duration_is_written_as_prometheus_writes_it(seconds: float, text: str) -> None:
    assert prometheus_duration(seconds) == text


def test_a_duration_never_becomes_zero() -> None:
    assert prometheus_duration(1e-9) == "1ms"


@given(st.integers(min_value=1, max_value=10**9))
def test_what_is_written_is_read_back_to_the_millisecond(milliseconds: int) -> None:
    assert (
        round(parse_seconds("x", prometheus_duration(milliseconds / 1000)) * 1000) == milliseconds
    )


@each("text", ["", "m", "10 minutes", "-5", "5m 3s", "1d", "1m1"])
def test_a_text_that_is_no_duration_is_refused_by_name_and_value(text: str) -> None:
    with pytest.raises(SettingError, match=f"stall_window.*{text!r}"):
        parse_seconds("stall_window", text)
