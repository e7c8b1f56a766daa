"""The numbers of a run that a tracker gets: every metric of the run as a whole."""

from collections.abc import Mapping

from mp_agent.catalog.metric import Scope
from mp_agent.catalog.snapshot import Snapshot
from mp_agent.records.conditions import StoredConditionEvent

PREFIX = "mp_agent/"
_SINCE = "mp_agent.nonfinite.since_step"
_OF_FINITE = {
    "loss": ("loss",),
    "gradients": (
        *("grad_norm", "grad_abs_max", "grad_abs_min", "grad_zero", "grad_fp16_headroom"),
        "clip_coefficient",
    ),
}
"""Gauges that keep their last value while the loss, or the gradients, are NaN or Inf."""


def values_by_run(snapshot: Snapshot) -> Mapping[str, Mapping[str, float]]:
    """Return by run the metrics without labels of their own, by name, as `mp_agent/<name>`.

    Histograms, info metrics, and series of layers, ranks, nodes and optimizers are left out; and so
    is a value from before a NaN or Inf that goes on, so that its curve ends there.
    """
    found: dict[str, dict[str, float]] = {}
    old: list[tuple[str, str]] = []
    for family in snapshot:
        metric = family.metric
        if metric.name == _SINCE:
            old += [(sample.labels[0], sample.labels[1]) for sample in family.samples]
        if metric.scope is not Scope.RUN or metric.labels:
            continue
        name = PREFIX + metric.name.removeprefix("mp_agent.").replace(".", "_")
        for sample in family.samples:
            run, *others = sample.labels
            if isinstance(sample.value, float | int) and not any(others):
                found.setdefault(run, {})[name] = float(sample.value)
    for run, quantity in old:
        for name in _OF_FINITE[quantity]:
            found.get(run, {}).pop(PREFIX + name, None)
    return found


def values_of_event(event: StoredConditionEvent) -> Mapping[str, float]:
    """Return 1 for a condition that began to hold, 0 for one that ceased, under its name."""
    name = f"{PREFIX}condition/{event.condition.name}/{event.condition.severity}"
    return {name: float(event.state == "firing")}
