"""What norm is usual, against the same recursion in plain Python."""

from math import exp, inf, isinf, log, nan, sqrt

import pytest
import torch

from mp_agent.probe.guard.verdict import UsualNorm

CPU = torch.device("cpu")
Z, FACTOR, WARMUP, MEMORY = 5.0, 4.0, 4.0, 8.0


def _history() -> UsualNorm:
    return UsualNorm(z=Z, factor=FACTOR, warmup_steps=WARMUP, memory_steps=MEMORY, device=CPU)


def _observe(history: UsualNorm, *norms: float) -> None:
    for norm in norms:
        history.observe(torch.tensor(norm, dtype=torch.float64))


class _Reference:
    """The recursion, written from its definition."""

    def __init__(self) -> None:
        self.steps, self.mean, self.variance = 0, 0.0, 0.0

    @property
    def limit(self) -> float:
        if self.steps < WARMUP:
            return inf
        exponent = self.mean + max(Z * sqrt(self.variance), log(FACTOR))
        return exp(exponent) if exponent < 709.0 else inf

    def observe(self, norm: float) -> None:
        if not 0.0 < norm < inf:
            return
        bound = inf if self.steps < WARMUP else log(FACTOR)
        difference = min(log(norm) - self.mean, bound)
        weight = max(1.0 / (self.steps + 1), 1.0 / MEMORY)
        self.mean += weight * difference
        self.variance = (1.0 - weight) * (self.variance + weight * difference**2)
        self.steps += 1


def test_follows_the_definition_over_calm_and_spiking_norms():
    history, reference = _history(), _Reference()
    norms = [1.0, 1.3, 0.8, 1.1, 1.2, 400.0, 0.9, 1e-3, 1.0, 5e-324, 1.7e308, 1.0]
    for norm in norms:
        _observe(history, norm)
        reference.observe(norm)
        assert float(history.usual) == pytest.approx(exp(reference.mean), rel=1e-12)
        assert float(history.limit) == pytest.approx(reference.limit, rel=1e-9)


def test_nothing_is_a_spike_before_enough_norms_were_seen():
    history = _history()
    _observe(history, 1.0, 1.0, 1.0)
    assert isinf(float(history.limit))
    _observe(history, 1.0)
    assert float(history.limit) == pytest.approx(FACTOR)


@pytest.mark.parametrize("nothing", [0.0, -0.0, nan, inf])
def test_a_norm_that_says_nothing_changes_nothing(nothing):
    history = _history()
    _observe(history, 1.0, 2.0, 1.0, 2.0)
    before = float(history.usual), float(history.limit)
    _observe(history, nothing)
    assert (float(history.usual), float(history.limit)) == before


def test_one_outlier_of_any_size_moves_the_usual_norm_alike():
    small, large = _history(), _history()
    for history, outlier in ((small, 10.0), (large, 1e300)):
        _observe(history, 1.0, 1.0, 1.0, 1.0, outlier)
    assert float(small.usual) == float(large.usual) == pytest.approx(FACTOR ** (1 / 5))


def test_a_level_that_lasts_becomes_usual():
    history = _history()
    _observe(history, *[1.0] * 10, *[100.0] * 60)
    assert float(history.limit) > 100.0
