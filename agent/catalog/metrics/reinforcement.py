"""Metrics of reinforcement learning: log-probabilities of trainer and sampler."""

from collections.abc import Callable, Mapping
from math import ceil, sqrt

from mp_agent.catalog.metric import Reading, counter, gauge
from mp_agent.catalog.thresholds import level_label
from mp_agent.records.columns import DELTA_EDGES, LOGPROBS, delta_column
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import RunView

Columns = Mapping[str, float]

_SIGNIFICANT_VARIANCE = 1e-9
"""Share of the mean square from which a variance is more than the rounding of its sums."""


def k1(row: Columns) -> float | None:
    """Return the mean of the sampler's less the trainer's log-probability."""
    mean = _mean(row, "delta_sum")
    return None if mean is None else 0.0 - mean


def k3(row: Columns) -> float | None:
    """Return the mean of exp(Δ) - 1 - Δ."""
    return _mean(row, "k3_sum")


def policy_entropy(row: Columns) -> float | None:
    """Return the mean of -log p of the tokens by the trainer."""
    mean = _mean(row, "trainer_sum")
    return None if mean is None else 0.0 - mean


def delta_quantile(row: Columns, quantile: float) -> float | None:
    """Return a bound on a quantile of |Δ|, by the bin that it is in; None without tokens.

    The quantile is the smallest |Δ| that at least this share of the tokens do not exceed. What is
    returned is never below it, and at most 2^(1/4), 19 %, above; where it is less than 2^-14 or
    more than 64, at most 2^-14 or the largest |Δ|.
    """
    tokens, largest = row.get("tokens", 0.0), row.get("delta_abs_max")
    if tokens <= 0.0 or largest is None:
        return None
    rank, so_far = ceil(quantile * tokens), 0.0
    for place, edge in enumerate(DELTA_EDGES):
        so_far += row.get(delta_column(place), 0.0)
        if so_far >= rank:
            return min(edge, largest)
    return largest


def correlation(row: Columns) -> float | None:
    """Return Pearson's correlation of the two log-probabilities, -1 to 1.

    From the moments of the trainer's and of Δ, so that a correlation close to 1 is exact. None
    where a standard deviation is below 1/30 000 of the root mean square: it may be rounding then.
    """
    tokens = row.get("tokens", 0.0)
    if tokens <= 0.0:
        return None
    mean, mean_delta = row["trainer_sum"] / tokens, row["delta_sum"] / tokens
    squares, squares_delta = row["trainer_sum_squares"] / tokens, row["delta_sum_squares"] / tokens
    products = row["trainer_delta_sum"] / tokens
    trainer = squares - mean * mean
    delta = squares_delta - mean_delta * mean_delta
    trainer_delta = products - mean * mean_delta
    sampler = trainer - 2.0 * trainer_delta + delta
    squares_sampler = squares - 2.0 * products + squares_delta
    if trainer <= _SIGNIFICANT_VARIANCE * squares:
        return None
    if sampler <= _SIGNIFICANT_VARIANCE * max(squares, squares_delta, squares_sampler):
        return None
    # Divided first: of equal ones the result is exactly 1.
    found = ((trainer - trainer_delta) / trainer) / sqrt(sampler / trainer)
    return min(max(found, -1.0), 1.0)


def effective_samples(row: Columns) -> float | None:
    """Return (sum w)² / sum w² of the weights w = exp(Δ), divided by the number of tokens."""
    tokens, squares = row.get("tokens", 0.0), row.get("weight_sum_squares", 0.0)
    if tokens <= 0.0 or squares <= 0.0:
        return None
    total = row["weight_sum"]
    return min(1.0, (total / squares) * (total / tokens))


def _mean(row: Columns, column: str) -> float | None:
    tokens = row.get("tokens", 0.0)
    return row[column] / tokens if tokens > 0.0 and column in row else None


_K3_BOUNDS = ("logprob_k3_high", "logprob_k3_extreme")
_TAIL = 0.999


def _of_run(read: Callable[[Columns], float | None]) -> Callable[[RunView], Reading]:
    def read_run(run: RunView) -> Reading:
        row = run.latest.families.get(LOGPROBS.name)
        return None if row is None else read(row)

    return read_run


def _of_step(column: str) -> Callable[[StepTransition], Reading]:
    def count_step(change: StepTransition) -> Reading:
        return change.step.families.get(LOGPROBS.name, {}).get(column, 0.0)

    return count_step


def _bounds(thresholds: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    return tuple((level_label(name),) for name in _K3_BOUNDS)


def _mismatched(change: StepTransition) -> Reading:
    row = change.step.families.get(LOGPROBS.name, {})
    divergence, tail = k3(row), delta_quantile(row, _TAIL)
    if not change.step.counts(LOGPROBS) or divergence is None or tail is None:
        return {}
    in_many_tokens = tail > change.thresholds["logprob_delta_tail"]
    return {
        (level_label(name),): float(in_many_tokens and divergence > change.thresholds[name])
        for name in _K3_BOUNDS
    }


LOGPROB_MISMATCH_STEPS = counter(
    "mp_agent.logprobs.mismatch.steps",
    "{step}",
    labels=("bound",),
    label_values=_bounds,
    thresholds=(*_K3_BOUNDS, "logprob_delta_tail"),
    help="Steps whose k3 estimate was above the bound, by the bound's level, and of whose "
    "tokens at least one in a thousand differs by more than the threshold logprob_delta_tail.",
    count=_mismatched,
)

POLICY_ENTROPY = gauge(
    "mp_agent.policy.entropy",
    "{nat}",
    help="Mean over all tokens of -log p by the trainer: the entropy of the policy per token, as "
    "far as it drew them itself; of densities the differential entropy, which may be negative.",
    read=_of_run(policy_entropy),
)
POLICY_COLLAPSED_STEPS = gauge(
    "mp_agent.policy.collapsed.steps",
    "{step}",
    thresholds=("policy_entropy_fallen",),
    help="Steps with log-probabilities in a row for which the median of mp_agent_policy_entropy "
    "over the last 8 has been below the share policy_entropy_fallen of the highest median of the "
    "attempt; 0 where that was never 0.1 nats, and none of densities.",
    read=lambda run: run.policy_collapsed_steps,
)

LOGPROB_METRICS = (
    POLICY_ENTROPY,
    POLICY_COLLAPSED_STEPS,
    gauge(
        "mp_agent.logprobs.k1",
        "{nat}",
        help="Mean over all tokens of the sampler's less the trainer's log-probability: Schulman's "
        "k1 estimate of KL(sampler || trainer); unbiased, and negative at times.",
        read=_of_run(k1),
    ),
    gauge(
        "mp_agent.logprobs.k3",
        "{nat}",
        help="Mean over all tokens of r - 1 - log r with r = exp(trainer - sampler): Schulman's k3 "
        "estimate of KL(sampler || trainer); never negative.",
        read=_of_run(k3),
    ),
    gauge(
        "mp_agent.logprobs.delta.max",
        "{nat}",
        help="Largest magnitude of the difference between the two log-probabilities of a token.",
        read=_of_run(lambda row: row.get("delta_abs_max")),
    ),
    gauge(
        "mp_agent.logprobs.delta.p999",
        "{nat}",
        help="99.9th percentile of that magnitude, from bins: never below it, at most 19 % above "
        "it between 6e-5 and 64.",
        read=_of_run(lambda row: delta_quantile(row, _TAIL)),
    ),
    gauge(
        "mp_agent.logprobs.correlation",
        "{correlation}",
        help="Pearson's correlation of the two log-probabilities over all tokens, -1 to 1; none "
        "where one of them is constant.",
        read=_of_run(correlation),
    ),
    gauge(
        "mp_agent.logprobs.effective.samples",
        "1",
        help="Effective sample size of the importance weights w = exp(trainer - sampler), "
        "(sum w)² / sum w², as a share of the tokens.",
        read=_of_run(effective_samples),
    ),
    counter(
        "mp_agent.logprobs.tokens",
        "{token}",
        help="Tokens whose log-probabilities by trainer and sampler were compared.",
        count=_of_step("tokens"),
    ),
    counter(
        "mp_agent.logprobs.nonfinite.tokens",
        "{token}",
        help="Tokens left out of the comparison, of which a log-probability is NaN, Inf or beyond "
        "1e100.",
        count=_of_step("nonfinite_tokens"),
    ),
    counter(
        "mp_agent.logprobs.clipped.tokens",
        "{token}",
        help="Tokens whose log-probability by the trainer is more than 300 above the sampler's: "
        "their weight counts as exp(300).",
        count=_of_step("clipped_tokens"),
    ),
    counter(
        "mp_agent.logprobs.refused.calls",
        "{call}",
        help="Calls of observe_logprobs with what cannot be compared, such as different shapes.",
        count=_of_step("refused_calls"),
    ),
    LOGPROB_MISMATCH_STEPS,
)
