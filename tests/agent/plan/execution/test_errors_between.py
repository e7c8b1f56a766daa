"""Each number is that of an independent reference in exact or extended arithmetic."""

from fractions import Fraction
from math import inf, isnan, nan, sqrt

import numpy as np
import pytest
import torch

from mp_agent.plan.execution.errors import error_between, relative_error, ulps
from mp_agent.plan.precision_plan import BF16, FP8_E4M3, FP16, FP32, FP64
from tests.agent.plan.formats_reference import SMALL, step_at
from tests.subtests import each

HUGE, TINY = 1.7e308, 5e-324
CASES = {
    "ordinary": ([1.0, -2.0, 3.5], [1.001, -2.01, 3.5]),
    "one element": ([2.0], [2.5]),
    "equal": ([1.0, -2.0], [1.0, -2.0]),
    "opposite": ([1.0, -2.0], [-1.0, 2.0]),
    "negative zero": ([0.0, -0.0], [-0.0, 0.0]),
    "zero reference": ([0.0, 0.0], [0.0, 1e-3]),
    "zero candidate": ([1e-8, 2.0], [0.0, 2.0]),
    "huge": ([HUGE, -HUGE], [HUGE / 2, -HUGE]),
    "float64 subnormal": ([TINY, 3 * TINY], [2 * TINY, 3 * TINY]),
    "fp32 subnormal": ([1e-40, 1.0], [2e-40, 1.0]),
    "wide": ([1e-200, 1e200], [2e-200, 1.5e200]),
    "nan and inf": ([1.0, 2.0, nan, inf, 5.0, -inf], [nan, inf, 3.0, inf, 5.5, 1.0]),
    "all lost": ([1.0, 2.0], [nan, -inf]),
}


def reference(a: list[float], b: list[float]) -> dict[str, float]:
    """Return the statistics in exact rational arithmetic; roots are taken last."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if np.isfinite(x) and np.isfinite(y)]
    exact = [(Fraction(x), Fraction(y)) for x, y in pairs]
    differences = [abs(y - x) for x, y in exact]
    top = sum(d * d for d in differences)
    bottom, other = sum(x * x for x, _ in exact), sum(y * y for _, y in exact)
    steps = [Fraction(float(np.spacing(abs(x)))) for x, _ in pairs]
    counted = [d / s for d, s in zip(differences, steps, strict=True)]
    dot = sum(x * y for x, y in exact)
    cosine = 1.0 if bottom == other else 0.0
    if bottom and other:
        cosine = float(np.sign(float(dot > 0) - float(dot < 0))) * root(
            dot * dot / (bottom * other)
        )
    finite = [(x, y) for x, y in zip(a, b, strict=True) if np.isfinite(x)]
    return {
        "elements": len(a),
        "relative_l2": (inf if top else 0.0) if not bottom else root(top / bottom),
        "mean_abs": as_float(sum(differences) / max(len(pairs), 1)),
        "max_abs": as_float(max(differences, default=Fraction(0))),
        "ulps_mean": as_float(sum(counted) / max(len(pairs), 1)),
        "ulps_max": as_float(max(counted, default=Fraction(0))),
        "cosine": cosine,
        "overflow_ratio": sum(np.isinf(y) for _, y in finite) / max(len(a), 1),
        "nan_ratio": sum(isnan(y) for _, y in finite) / max(len(a), 1),
        "underflow_ratio": sum(x != 0 and y == 0 for x, y in finite) / max(len(a), 1),
        "subnormal_ratio": sum(0 < abs(y) < 2.0**-1022 for _, y in finite) / max(len(a), 1),
        "reference_nonfinite_ratio": sum(not np.isfinite(x) for x in a) / max(len(a), 1),
    }


def as_float(value: Fraction | float) -> float:
    """Return Inf for what is beyond the largest float."""
    try:
        return float(value)
    except OverflowError:
        return inf


def root(value: Fraction) -> float:
    """Return a square root without leaving the range of a float on the way."""
    if value == 0:
        return 0.0
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    return sqrt(float(value / Fraction(4) ** shift)) * 2.0**shift


@each("name", CASES)
def test_every_number_is_that_of_exact_arithmetic(name):
    a, b = CASES[name]
    pair = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    made = error_between([pair], FP64)
    for field, expected in reference(a, b).items():
        assert getattr(made, field) == pytest.approx(expected, rel=1e-12, abs=0), field


def test_random_tensors_in_several_pieces_and_dtypes(monkeypatch):
    monkeypatch.setattr("mp_agent.plan.execution.errors._PIECE_ELEMENTS", 100)
    generator = torch.Generator().manual_seed(3)
    one = torch.randn(37, 11, generator=generator)
    other = one.half()
    more = torch.randn(5, generator=generator).exp()
    made = error_between([(one, other), (more, more.bfloat16())], FP64)
    a = [*one.flatten().tolist(), *more.tolist()]
    b = [*other.double().flatten().tolist(), *more.bfloat16().double().tolist()]
    for field, expected in reference(a, b).items():
        assert getattr(made, field) == pytest.approx(expected, rel=1e-12, abs=0), field


def test_nothing_has_no_error():
    made = error_between([(torch.empty(0), torch.empty(0))], FP16)
    assert (made.elements, made.relative_l2, made.cosine, made.mean_abs) == (0, 0.0, 1.0, 0.0)
    assert error_between([], FP16) == made
    assert relative_error([]) == (0.0, False)


@pytest.mark.parametrize("number_format", SMALL, ids=lambda one: one.name)
def test_units_in_the_last_place_are_the_distances_between_all_values(number_format):
    largest = number_format.largest
    values = [0.0, 1.0, 1.5, 2.0, 0.3, 3e-5, 1e-7, largest / 2, number_format.smallest_normal]
    values += [number_format.smallest_normal / 2, number_format.smallest_normal * 0.999]
    found = ulps(torch.tensor(values, dtype=torch.float64), number_format)
    assert found.tolist() == [step_at(value, number_format) for value in values]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_units_in_the_last_place_are_those_of_numpy(dtype):
    number_format = {np.float32: FP32, np.float64: FP64}[dtype]
    info = np.finfo(dtype)
    values = [1.0, 0.1, 1e30, info.tiny, info.tiny / 4, info.smallest_subnormal, info.max / 4, 0.0]
    exact = np.array(values, dtype=dtype)
    found = ulps(torch.from_numpy(exact).double(), number_format)
    assert found.tolist() == [float(np.spacing(one)) for one in exact]


def test_an_error_of_rounding_is_at_most_half_a_unit():
    values = torch.randn(10_000)
    assert error_between([(values, values.half())], FP16).ulps_max <= 0.5
    assert error_between([(values, values.bfloat16())], BF16).ulps_max <= 0.5
    rounded = values.float().to(torch.float8_e4m3fn).float()
    assert error_between([(values, rounded)], FP8_E4M3).ulps_max <= 0.5 + 1e-6


def test_a_loss_scale_is_divided_out_but_what_it_saved_from_underflow_counts():
    gradient = torch.tensor([1e-9, 2.0], dtype=torch.float64)
    scaled = (gradient * 1024).half()
    plain = error_between([(gradient, gradient.half())], FP16)
    saved = error_between([(gradient, scaled)], FP16, 1024.0)
    assert plain.underflow_ratio == 0.5 and saved.underflow_ratio == 0.0
    assert saved.relative_l2 < 1e-3


def test_the_cheap_error_is_the_same():
    for a, b in CASES.values():
        pair = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        full = error_between([pair], FP64)
        error, lost = relative_error([pair])
        assert error == pytest.approx(full.relative_l2, rel=1e-12)
        assert lost is (full.nonfinite_ratio > 0)
