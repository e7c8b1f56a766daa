"""Log-probabilities of trainer and sampler in the account of a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.progress import Progress
from mp_agent.probe.instruments.logprobs import LogprobComparison, joined, refused_row
from mp_agent.records.columns import LOGPROBS, by_name
from mp_agent.records.merged import MergedStep
from tests.agent.node.builders import make_run_view, merged_step

_COMPARISON = LogprobComparison()
_PREFIX = "mp_agent_logprobs_"


@pytest.fixture
def account() -> Accumulator:
    return Accumulator(
        resolve({}), progress=Progress(), counters=CounterStore(), window_seconds=120.0
    )


def row_of(*deltas: float) -> torch.Tensor:
    delta = torch.tensor(deltas, dtype=torch.float64)
    trainer = torch.linspace(-3.0, -1.0, len(deltas), dtype=torch.float64)
    return _COMPARISON.row(trainer, trainer - delta, None)


def compared(sequence: int, row_C: torch.Tensor, *, whole: bool = True) -> MergedStep:
    step = merged_step(sequence)
    families = {**step.families, LOGPROBS.name: by_name(LOGPROBS.names, row_C.tolist())}
    complete = step.complete | {LOGPROBS.name} if whole else step.complete
    return replace(step, families=families, complete=complete)


def read(account: Accumulator, name: str) -> Any:
    metric = BY_PROMETHEUS_NAME[_PREFIX + name]
    assert metric.read is not None
    return metric.read(account.view(make_run_view(), 0.0))


def total(account: Accumulator, name: str, *labels: str) -> float:
    return float(account.counters.total(BY_PROMETHEUS_NAME[f"{_PREFIX}{name}_total"], labels))


def test_gauges_are_those_of_the_last_step_that_counts(account):
    account.fold_step(compared(1, row_of(0.5, -0.5, 0.25)))
    account.fold_step(compared(2, row_of(9.0), whole=False))
    account.fold_step(merged_step(3))

    assert read(account, "k1") == pytest.approx(-0.25 / 3)
    assert read(account, "delta_max") == read(account, "delta_p999") == 0.5
    assert 0.8 < read(account, "effective_samples_ratio") < 1.0
    assert 0.5 < read(account, "correlation") < 1.0


def test_a_run_without_them_has_no_gauges(account):
    account.fold_step(merged_step(1))
    names = ("k1", "k3", "delta_max", "delta_p999", "correlation", "effective_samples_ratio")
    assert [read(account, name) for name in names] == [None] * 6


def test_a_step_of_which_no_token_is_finite_has_counts_and_no_gauges(account):
    nothing = _COMPARISON.row(torch.tensor([float("nan")]), torch.tensor([-1.0]), None)
    account.fold_step(compared(1, joined(nothing, refused_row())))
    assert read(account, "k3") is None
    assert total(account, "nonfinite_tokens") == total(account, "refused_calls") == 1.0


def test_tokens_are_counted_over_all_steps(account):
    account.fold_step(compared(1, row_of(0.5, 0.25)))
    account.fold_step(compared(2, row_of(400.0)))
    assert total(account, "tokens") == 3.0
    assert total(account, "clipped_tokens") == 1.0


@pytest.mark.parametrize(
    ("deltas", "high", "extreme"),
    [
        ([0.01] * 2000, 0, 0),
        ([0.2] * 2000, 1, 0),
        ([0.6] * 2000, 1, 1),
        ([6.0] + [0.0] * 1999, 0, 0),
        ([6.0] * 3 + [0.0] * 1997, 1, 1),
    ],
    ids=["alike", "apart", "other policy", "one token", "three tokens in 2000"],
)
def test_steps_with_many_different_tokens_are_counted_by_level(deltas, high, extreme, account):
    account.fold_step(compared(1, row_of(*deltas)))
    assert total(account, "mismatch_steps", "high") == high
    assert total(account, "mismatch_steps", "extreme") == extreme


def drawn(account: Accumulator, sequence: int, *logprobs: float) -> None:
    trainer = torch.tensor(logprobs, dtype=torch.float64)
    account.fold_step(compared(sequence, _COMPARISON.row(trainer, trainer, None)))


def entropy(account: Accumulator) -> list[Any]:
    policy = [BY_PROMETHEUS_NAME[f"mp_agent_policy_{name}"].read for name in _POLICY]
    view = account.view(make_run_view(), 0.0)
    return [read(view) for read in policy if read is not None]


_POLICY = ("entropy", "collapsed_steps")


def test_entropy_is_the_mean_of_the_negative_log_probabilities_of_what_was_drawn(account):
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    times = (8 * probabilities).long()
    drawn(account, 1, *probabilities.log().repeat_interleave(times).tolist())
    exact = float(-(probabilities * probabilities.log()).sum())
    assert entropy(account) == [pytest.approx(exact), 0.0]


def test_a_policy_has_collapsed_once_little_of_its_highest_entropy_remains_for_long(account):
    for sequence in range(1, 41):
        drawn(account, sequence, -2.0 if sequence <= 20 else -0.09)
        if sequence == 24:
            assert entropy(account)[1] == 0.0  # the median of eight is not there yet
    assert entropy(account) == [pytest.approx(0.09), 16.0]
    drawn(account, 41, -2.0)
    assert entropy(account)[1] == 17.0
    for sequence in range(42, 46):
        drawn(account, sequence, -2.0)
    assert entropy(account) == [2.0, 0.0]


def test_steps_without_log_probabilities_say_nothing_of_a_policy(account):
    for sequence in range(1, 60, 2):
        drawn(account, sequence, -2.0 if sequence < 30 else -0.05)
        account.fold_step(merged_step(sequence + 1))
    assert entropy(account)[1] == 11.0


def test_a_policy_that_was_never_uncertain_has_not_collapsed(account):
    for sequence in range(1, 61):
        drawn(account, sequence, -0.09 if sequence <= 20 else 0.0)
    assert entropy(account)[1] == 0.0


def test_of_densities_and_without_log_probabilities_no_collapse_is_known(account):
    account.fold_step(merged_step(1))
    assert entropy(account) == [None, None]
    for sequence in range(2, 62):
        drawn(account, sequence, *((-3.0, 0.2) if sequence <= 20 else (-0.05, 0.2)))
    assert entropy(account)[1] is None
