"""The numbers of a run that a tracker gets: every metric of the run as a whole."""

from collections.abc import Mapping

from mp_agent.catalog.metric import Scope
from mp_agent.catalog.snapshot import Snapshot
from mp_agent.records.conditions import StoredConditionEvent

PREFIX = "mp_agent/"


def values_by_run(snapshot: Snapshot) -> Mapping[str, Mapping[str, float]]:
    """Return by run the metrics without labels of their own, by name, as `mp_agent/<name>`.

    Histograms, info metrics, and series of layers, ranks, nodes and optimizers are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for family in snapshot:
        metric = family.metric
        if metric.scope is not Scope.RUN or metric.labels:
            continue
        name = PREFIX + metric.name.removeprefix("mp_agent.").replace(".", "_")
        for sample in family.samples:
            run, *others = sample.labels
            if isinstance(sample.value, float | int) and not any(others):
                found.setdefault(run, {})[name] = float(sample.value)
    return found


def values_of_event(event: StoredConditionEvent) -> Mapping[str, float]:
    """Return 1 for a condition that began to hold, 0 for one that ceased, under its name."""
    name = f"{PREFIX}condition/{event.condition.name}/{event.condition.severity}"
    return {name: float(event.state == "firing")}
