"""Logits that the loss is computed from, at the latest step that was sampled."""

from collections.abc import Callable

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.columns import LOGITS
from mp_agent.records.views import RunView


def _of_run(column: str) -> Callable[[RunView], Reading]:
    return lambda run: run.families.get(LOGITS.name, {}).get(column)


def _mean(run: RunView) -> Reading:
    row = run.families.get(LOGITS.name, {})
    rows = row.get("rows", 0.0) - row.get("nonfinite_rows", 0.0)
    return row["logsumexp_sum"] / rows if rows and "logsumexp_sum" in row else None


def _size(run: RunView) -> Reading:
    return None if run.health.logits is None else run.health.logits.logsumexp_size


def _growth(run: RunView) -> Reading:
    return None if run.health.logits is None else run.health.logits.logsumexp_growth


OUTPUT_LOGIT_METRICS = (
    Metric(
        name="mp_agent.output.logit.max",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Largest finite logit of a few rows that cross_entropy was given, in the first "
        "forward pass of a sampled step.",
        read=_of_run("logit_max"),
    ),
    Metric(
        name="mp_agent.output.logsumexp.max",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Largest log-sum-exp (log Z, by which softmax normalizes) of those rows.",
        read=_of_run("logsumexp_max"),
    ),
    Metric(
        name="mp_agent.output.logsumexp.min",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Smallest log-sum-exp of those rows.",
        read=_of_run("logsumexp_min"),
    ),
    Metric(
        name="mp_agent.output.logsumexp.mean",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Mean log-sum-exp of those rows, of those where it is finite.",
        read=_mean,
    ),
    Metric(
        name="mp_agent.output.logsumexp.size",
        unit="{logit}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Largest magnitude of a log-sum-exp of those rows.",
        read=_size,
    ),
    Metric(
        name="mp_agent.output.logsumexp.growth",
        unit="{factor}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Median of the last three samples of that magnitude, divided by the median of the "
        "run's earlier half of samples, or by 1 where that is less. Absent before 8 samples.",
        read=_growth,
    ),
    Metric(
        name="mp_agent.output.nonfinite.rows",
        unit="{row}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Rows whose log-sum-exp was NaN or Inf, of those looked at, in the steps that were "
        "sampled.",
        count=lambda change: change.step.families.get(LOGITS.name, {}).get("nonfinite_rows", 0.0),
    ),
)
