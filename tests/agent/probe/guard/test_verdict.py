"""What is decided from the agreed numbers."""

from math import inf

import pytest
import torch

from mp_agent.catalog.guard import POLICIES, with_defaults
from mp_agent.probe.guard.verdict import (
    FAILURES,
    NONFINITE,
    NUMBERS,
    SCALER_SKIPS,
    SQUARES,
    Judge,
    UpdateVerdict,
    failed,
    skipped_by_scaler,
)

CPU = torch.device("cpu")
ALL = with_defaults({policy.name: {} for policy in POLICIES})
RANKS = 2


def _numbers(norm: float = 1.0, **others: float) -> torch.Tensor:
    numbers = torch.zeros(NUMBERS, dtype=torch.float64)
    numbers[SQUARES] = norm * norm
    for name, value in others.items():
        numbers[{"nonfinite": NONFINITE, "skips": SCALER_SKIPS, "failures": FAILURES}[name]] = value
    return numbers


def _judge(*names: str, calm_steps: int = 30) -> Judge:
    judge = Judge({name: ALL[name] for name in names}, CPU)
    for _ in range(calm_steps):
        judge.judge(_numbers(), RANKS)
    return judge


def _done(verdict: UpdateVerdict) -> tuple[bool, float]:
    return bool(verdict.is_skipped), float(verdict.coefficient)


def test_a_calm_update_is_left_alone():
    verdict = _judge("skip_nonfinite", "clip_spikes", "skip_spikes").judge(_numbers(3.9), RANKS)
    assert _done(verdict) == (False, 1.0)
    assert not verdict.is_spike


def test_gradients_that_are_not_finite_are_skipped_by_that_policy_alone():
    assert _done(_judge("skip_nonfinite").judge(_numbers(nonfinite=1.0), RANKS)) == (True, 1.0)
    verdict = _judge("clip_spikes", "skip_spikes").judge(_numbers(1e9, nonfinite=1.0), RANKS)
    assert _done(verdict) == (False, 1.0)
    assert verdict.is_nonfinite


@pytest.mark.parametrize("norm", [5.0, 1e6, 1e150, inf])
def test_a_spike_is_scaled_down_to_the_usual_norm(norm):
    skipped, coefficient = _done(_judge("clip_spikes").judge(_numbers(norm), RANKS))
    assert not skipped
    assert coefficient == (pytest.approx(1.0 / norm) if norm < inf else 0.0)


def test_a_spike_that_is_skipped_is_not_scaled_down_as_well():
    judge = _judge("clip_spikes", "skip_spikes")
    assert _done(judge.judge(_numbers(1e3), RANKS)) == (True, 1.0)


def test_an_update_that_the_scalers_of_all_ranks_skip_needs_nothing():
    judge = _judge("skip_nonfinite")
    verdict = judge.judge(RANKS * skipped_by_scaler(CPU), RANKS)
    assert _done(verdict) == (False, 1.0)
    assert verdict.is_scaler_skip


def test_an_update_that_one_scaler_skips_is_skipped_everywhere():
    verdict = _judge("skip_nonfinite").judge(_numbers() + skipped_by_scaler(CPU), RANKS)
    assert _done(verdict) == (True, 1.0)


def test_nothing_is_decided_where_a_rank_could_not_measure():
    judge = _judge("skip_nonfinite", "clip_spikes")
    verdict = judge.judge(_numbers(1e6, nonfinite=3.0) + failed(CPU), RANKS)
    assert _done(verdict) == (False, 1.0)
    assert verdict.is_failed


def test_a_policy_that_has_acted_too_often_says_so_and_does_nothing():
    judge = _judge("skip_nonfinite")
    verdicts = [judge.judge(_numbers(nonfinite=1.0), RANKS) for _ in range(11)]
    assert [bool(verdict.is_skipped) for verdict in verdicts[:10]] == [True] * 10
    assert _done(verdicts[-1]) == (False, 1.0)
    assert verdicts[-1].is_none_left
