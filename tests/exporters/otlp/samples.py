"""Snapshots and events for the tests of the OTLP exporter."""

from dataclasses import replace
from typing import Any

from mp_agent.catalog.metric import Family, HistogramValue, Kind, Metric, Sample, Snapshot
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME, METRICS
from mp_agent.exporters.otlp.signal_pusher import MetricBatch
from mp_agent.records.conditions import ActiveCondition, StoredConditionEvent

NOW = 1_800_000_000.0
BORN_UNIX_NS = 1_700_000_000 * 10**9

STEPS = BY_PROMETHEUS_NAME["mp_agent_steps_total"]
LOSS = BY_PROMETHEUS_NAME["mp_agent_loss"]
PHASE = BY_PROMETHEUS_NAME["mp_agent_phase_info"]
DURATION = BY_PROMETHEUS_NAME["mp_agent_step_duration_seconds"]
FAILURES = BY_PROMETHEUS_NAME["mp_agent_export_failures_total"]
LAYER_NORM = BY_PROMETHEUS_NAME["mp_agent_layer_grad_norm"]


def family(metric: Metric, *samples: tuple[tuple[str, ...], float | HistogramValue]) -> Family:
    return Family(metric, tuple(Sample(*sample) for sample in samples))


def snapshot(*families: Family, at: float = NOW) -> Snapshot:
    return Snapshot(families, at)


def steps(count: float, *, run: str = "llama", at: float = NOW) -> Snapshot:
    return snapshot(family(STEPS, ((run,), count)), at=at)


def duration(*counts: int, total: float = 1.0) -> HistogramValue:
    """Return a histogram of these counts per bucket; further buckets are empty."""
    cumulative, below = [], 0
    for index in range(len(DURATION.bounds) + 1):
        below += counts[index] if index < len(counts) else 0
        cumulative.append(below)
    return HistogramValue((*DURATION.bounds, float("inf")), tuple(cumulative), total)


def everything() -> Snapshot:
    """Two series of every family of the catalog, one of them with an empty last label."""
    families = []
    for number, metric in enumerate(METRICS):
        labels = tuple(f"some {name}.é" for name in metric.label_names)
        value: float | HistogramValue = number + 0.1
        if metric.kind is Kind.INFO:
            value = 1.0
        if metric.kind is Kind.HISTOGRAM:
            counts = tuple(3 * index for index in range(1, len(metric.bounds) + 2))
            value = HistogramValue((*metric.bounds, float("inf")), counts, 2.5)
        pairs = [(labels, value)]
        if len(metric.label_names) > len(metric.scope.value):
            pairs.append(((*labels[:-1], ""), value))
        families.append(family(metric, *pairs))
    return snapshot(*families)


def batch_of(shown: Snapshot, delivered: Any = lambda: None) -> MetricBatch:
    runs = {sample.labels[0] for each in shown for sample in each.samples}
    return MetricBatch(shown, dict.fromkeys(runs, BORN_UNIX_NS), delivered)


CONDITION = ActiveCondition(
    name="MpAgentGradientExplosion",
    severity="critical",
    run="llama",
    since_step=40,
    since_unix_seconds=NOW - 10,
    value=1234.5,
    summary="The gradients explode.",
    description="The gradient norm of run llama is 1234.5.",
    remedy="Lower the learning rate.",
    rank="3",
    layer="model.layers.0",
)


def event(state: str = "firing", at: float = NOW, **changes: Any) -> StoredConditionEvent:
    return StoredConditionEvent(
        state=state,
        condition=replace(CONDITION, **changes),
        step=42,
        time_unix_seconds=at,
    )
