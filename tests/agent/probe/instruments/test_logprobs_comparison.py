"""Rows of log-probabilities say what NumPy makes of all tokens at once, at the edges too."""

from collections.abc import Mapping
from math import exp, inf, isfinite, nan

import numpy as np
import pytest
import torch

from mp_agent.catalog.metrics.reinforcement import (
    correlation,
    delta_quantile,
    effective_samples,
    k1,
    k3,
)
from mp_agent.probe.instruments.logprobs import LogprobComparison, joined, refused_row
from mp_agent.records.columns import LOGPROBS, by_name
from tests.agent.probe.instruments.logprobs_reference import Expected, expected_of
from tests.subtests import each

Row = Mapping[str, float]
COMPARISON = LogprobComparison()


def named(row_C: torch.Tensor) -> Row:
    return by_name(LOGPROBS.names, row_C.tolist())


def compared(trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor | None = None) -> Row:
    return named(COMPARISON.row(trainer, sampler, mask))


def drawn(*shape: int, seed: int = 0, differ: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trainer = -torch.rand(shape, generator=generator).mul(5).square()
    return trainer, trainer + differ * torch.randn(shape, generator=generator)


def assert_is(row: Row, expected: Expected, rel: float = 1e-9) -> None:
    assert row["tokens"] == expected.tokens
    assert row["nonfinite_tokens"] == expected.nonfinite
    assert k1(row) == (None if expected.k1 is None else pytest.approx(expected.k1, rel=rel))
    assert k3(row) == (None if expected.k3 is None else pytest.approx(expected.k3, rel=rel))
    assert row.get("delta_abs_max") == expected.largest
    for found, value in (
        (correlation(row), expected.correlation),
        (effective_samples(row), expected.effective),
    ):
        assert found == (None if value is None else pytest.approx(value, rel=rel))
    tail = delta_quantile(row, 0.999)
    if expected.tail is None:
        assert tail is None
    else:
        assert tail is not None
        assert expected.tail <= tail <= max(2.0**0.25 * expected.tail, 2.0**-14)


def against_numpy(
    trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    arrays = [each.detach().double().numpy() for each in (trainer, sampler)]
    chosen = None if mask is None else mask.double().numpy()
    assert_is(compared(trainer, sampler, mask), expected_of(arrays[0], arrays[1], chosen))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_statistics_are_those_of_numpy_in_every_format(dtype):
    trainer, sampler = (each.to(dtype) for each in drawn(7, 513))
    against_numpy(trainer, sampler)


@pytest.mark.parametrize("differ", [1e-6, 0.003, 0.7, 4.0])
def test_the_tail_is_within_its_bound_at_every_size_of_the_difference(differ):
    against_numpy(*drawn(4000, differ=differ))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_any_type_chooses_tokens(dtype):
    trainer, sampler = drawn(3, 50)
    mask = (torch.rand(3, 50, generator=torch.Generator().manual_seed(1)) < 0.4).to(dtype)
    against_numpy(trainer, sampler, mask)


def test_more_tokens_than_a_piece_holds_and_views_with_gaps_are_all_counted():
    trainer, sampler = drawn(70_001)
    against_numpy(trainer, sampler)
    wide_trainer, wide_sampler = drawn(40, 60)
    against_numpy(wide_trainer.T[::2], wide_sampler.T[::2])


def test_one_token_has_everything_but_a_correlation():
    row = compared(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert (k1(row), row["delta_abs_max"], delta_quantile(row, 0.999)) == (-0.5, 0.5, 0.5)
    assert k3(row) == pytest.approx(exp(0.5) - 1.5, rel=1e-15)
    assert effective_samples(row) == 1.0
    assert correlation(row) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_log_probabilities_differ_by_exactly_nothing(dtype):
    trainer, _ = drawn(999)
    row = compared(trainer.to(dtype), trainer.to(dtype).clone())
    assert (k1(row), k3(row), row["delta_abs_max"], delta_quantile(row, 0.999)) == (0, 0, 0, 0)
    assert correlation(row) == effective_samples(row) == 1.0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 4)])
def test_no_token_has_no_statistics(shape):
    trainer, sampler = drawn(*shape)
    row = compared(trainer, sampler, torch.zeros(shape))
    assert_is(row, Expected(tokens=0, nonfinite=0))


@each(
    ("trainer", "sampler"),
    [(-inf, -2.0), (-2.0, -inf), (-inf, -inf), (nan, -1.0), (-1.0, nan), (inf, -1.0)],
)
def test_tokens_that_are_not_finite_are_left_out_and_counted(trainer, sampler):
    one, other = drawn(20)
    one[3], other[3] = trainer, sampler
    against_numpy(one, other)
    hidden = torch.ones(20)
    hidden[3] = 0.0
    against_numpy(one, other, hidden)


def test_only_tokens_that_are_not_finite_have_no_statistics():
    row = compared(torch.full((5,), -inf), torch.full((5,), nan))
    assert_is(row, Expected(tokens=0, nonfinite=5))


def test_a_difference_whose_exponential_overflows_stays_finite_and_is_counted():
    lowest = torch.finfo(torch.float32).min
    trainer = torch.tensor([-1.0, -1.0, -0.5, lowest])
    sampler = torch.tensor([-1.0, lowest, -1000.0, -1.0])
    row = compared(trainer, sampler)
    assert row["clipped_tokens"] == 2
    assert row["delta_abs_max"] == -float(lowest) - 1.0
    readings = (k1(row), k3(row), correlation(row), effective_samples(row))
    assert all(reading is not None and isfinite(reading) for reading in readings)
    assert k3(row) == pytest.approx((2 * np.expm1(300.0) - float(lowest)) / 4, rel=1e-6)


def test_what_is_beyond_any_log_probability_counts_as_not_finite():
    huge = torch.tensor([-1e200, -1.0], dtype=torch.float64)
    row = compared(huge, torch.tensor([-1.0, -1.0], dtype=torch.float64))
    assert (row["tokens"], row["nonfinite_tokens"]) == (1, 1)


def test_weights_that_are_all_tiny_have_the_effective_size_of_equal_ones():
    row = compared(torch.full((8,), -900.0), torch.full((8,), -1.0))
    assert effective_samples(row) == pytest.approx(1.0)
    assert k3(row) == pytest.approx(899.0 - 1.0)


def test_a_correlation_is_right_far_from_zero_and_absent_where_it_would_be_rounding():
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(2, 5000, generator=generator, dtype=torch.float64)
    trainer = -500.0 + noise[0]
    sampler = trainer + 1e-4 * noise[1]
    row = compared(trainer, sampler)
    expected = expected_of(trainer.numpy(), sampler.numpy()).correlation
    assert expected is not None
    assert correlation(row) == pytest.approx(expected, abs=1e-9)
    constant = torch.full((5000,), -0.3)
    assert correlation(compared(constant, sampler.float())) is None
    assert correlation(compared(sampler.float(), constant)) is None


def test_rows_joined_in_any_order_are_the_row_of_all_tokens():
    parts = [drawn(n, seed=n) for n in (1, 90, 400)]
    rows = [COMPARISON.row(*part, None) for part in parts]
    trainer, sampler = (torch.cat(own) for own in zip(*parts, strict=True))
    expected = expected_of(trainer.double().numpy(), sampler.double().numpy())
    assert_is(named(joined(joined(rows[0], rows[1]), rows[2])), expected)
    assert_is(named(joined(rows[2], joined(rows[1], rows[0]))), expected)


def test_a_refused_call_adds_itself_and_nothing_else():
    row_C = COMPARISON.row(*drawn(10), None)
    row, with_refused = named(row_C), named(joined(refused_row(), row_C))
    assert with_refused == {**row, "refused_calls": 1.0}


def test_bins_hold_every_token_once_and_each_edge_in_the_bin_below_it():
    edges = torch.tensor([2.0**-14, 2.0**-13.75, 1.0, 64.0], dtype=torch.float64)
    row = compared(edges, torch.zeros(4, dtype=torch.float64))
    bins = {
        name: row[name] for name in LOGPROBS.names if name.startswith("delta_bin") and row[name]
    }
    assert bins == {"delta_bin_0": 1, "delta_bin_1": 1, "delta_bin_56": 1, "delta_bin_80": 1}
    beyond = compared(torch.tensor([65.0]), torch.tensor([0.0]))
    assert beyond["delta_bin_81"] == 1.0
    assert delta_quantile(beyond, 0.999) == 65.0
