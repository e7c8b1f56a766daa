"""Run scope: log-probabilities of the same tokens by trainer and sampler, of all ranks."""

from collections.abc import Callable, Mapping

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.catalog.metrics.reinforcement.quantities import (
    Columns,
    correlation,
    delta_quantile,
    effective_samples,
    k1,
    k3,
)
from mp_agent.catalog.thresholds import level_label
from mp_agent.records.columns import LOGPROBS
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import RunView

_K3_BOUNDS = ("logprob_k3_high", "logprob_k3_extreme")
_TAIL = 0.999


def _of_run(read: Callable[[Columns], float | None]) -> Callable[[RunView], Reading]:
    def read_run(run: RunView) -> Reading:
        row = run.families.get(LOGPROBS.name)
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


LOGPROB_METRICS = (
    Metric(
        name="mp_agent.logprobs.k1",
        unit="{nat}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Mean over all tokens of the sampler's less the trainer's log-probability: Schulman's "
        "k1 estimate of KL(sampler || trainer); unbiased, and negative at times.",
        read=_of_run(k1),
    ),
    Metric(
        name="mp_agent.logprobs.k3",
        unit="{nat}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Mean over all tokens of r - 1 - log r with r = exp(trainer - sampler): Schulman's k3 "
        "estimate of KL(sampler || trainer); never negative.",
        read=_of_run(k3),
    ),
    Metric(
        name="mp_agent.logprobs.delta.max",
        unit="{nat}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Largest magnitude of the difference between the two log-probabilities of a token.",
        read=_of_run(lambda row: row.get("delta_abs_max")),
    ),
    Metric(
        name="mp_agent.logprobs.delta.p999",
        unit="{nat}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="99.9th percentile of that magnitude, from bins: never below it, at most 19 % above "
        "it between 6e-5 and 64.",
        read=_of_run(lambda row: delta_quantile(row, _TAIL)),
    ),
    Metric(
        name="mp_agent.logprobs.correlation",
        unit="{correlation}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Pearson's correlation of the two log-probabilities over all tokens, -1 to 1; none "
        "where one of them is constant.",
        read=_of_run(correlation),
    ),
    Metric(
        name="mp_agent.logprobs.effective.samples",
        unit="1",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Effective sample size of the importance weights w = exp(trainer - sampler), "
        "(sum w)² / sum w², as a share of the tokens.",
        read=_of_run(effective_samples),
    ),
    Metric(
        name="mp_agent.logprobs.tokens",
        unit="{token}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Tokens whose log-probabilities by trainer and sampler were compared.",
        count=_of_step("tokens"),
    ),
    Metric(
        name="mp_agent.logprobs.nonfinite.tokens",
        unit="{token}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Tokens left out of the comparison, of which a log-probability is NaN, Inf or beyond "
        "1e100.",
        count=_of_step("nonfinite_tokens"),
    ),
    Metric(
        name="mp_agent.logprobs.clipped.tokens",
        unit="{token}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Tokens whose log-probability by the trainer is more than 300 above the sampler's: "
        "their weight counts as exp(300).",
        count=_of_step("clipped_tokens"),
    ),
    Metric(
        name="mp_agent.logprobs.refused.calls",
        unit="{call}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Calls of observe_logprobs with what cannot be compared, such as different shapes.",
        count=_of_step("refused_calls"),
    ),
    Metric(
        name="mp_agent.logprobs.mismatch.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("bound",),
        label_values=_bounds,
        thresholds=(*_K3_BOUNDS, "logprob_delta_tail"),
        help="Steps whose k3 estimate was above the bound, by the bound's level, and of whose "
        "tokens at least one in a thousand differs by more than the threshold logprob_delta_tail.",
        count=_mismatched,
    ),
)
