"""Values as texts: what is not a number, what is huge, and what is next to nothing."""

from math import inf, nan

import pytest

from mp_agent.report.numbers import counted, duration, finite, number, percent, scientific, size
from tests.subtests import each


@each(
    ("value", "digits", "text"),
    [
        (None, 4, "–"),
        (65536.0, 4, "65536"),
        (-3.0, 4, "-3"),
        (0.000123456, 4, "0.0001235"),
        (1.23456789, 6, "1.23457"),
        (1e7, 4, "1e+07"),
        (inf, 4, "inf"),
        (nan, 4, "nan"),
    ],
)
def test_a_number_has_some_digits_and_a_whole_one_all(value, digits, text):
    assert number(value, digits) == text


@each(
    ("value", "text"),
    [(None, "–"), (nan, "–"), (inf, "∞"), (0.0, "0"), (0.00012, "1.20e-04"), (2e6, "2.00e+06")],
)
def test_a_small_or_large_number_has_an_exponent(value, text):
    assert scientific(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.0, "0 %"), (1e-9, "< 0.01 %"), (0.005, "0.50 %"), (0.5, "50 %")]
)
def test_a_small_share_is_not_shown_as_none(ratio, text):
    assert percent(ratio) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (1536, "1.5 KiB"), (5 << 30, "5 GiB"), (1 << 52, "4096 TiB")],
)
def test_a_size_has_its_unit(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (61, "1 min 1 s"), (7500, "2 h 5 min"), (90_000, "1 d 1 h")]
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_a_count_agrees_with_its_noun():
    assert [counted(n, "file") for n in (0, 1, 2)] == ["0 files", "1 file", "2 files"]


def test_only_finite_values_can_be_drawn():
    assert finite([1.0, nan, None, -inf]) == [1.0, None, None, None]
