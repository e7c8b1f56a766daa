"""What a run would export, in a form that tests can look things up in."""

from mp_agent.catalog.metric import HistogramValue
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.run.run import Run
from mp_agent.node.series.snapshot_builder import SnapshotBuilder

MERGE_DEADLINE_SECONDS = 10.0
"""The default of the setting: what a node waits for a rank that lags."""


def shown(run: Run, now_seconds: float = 0.0) -> dict[str, float]:
    """Return what is exported, keyed like `name{value,value}` without the run's name."""
    export = run.export(now_seconds, 1_000.0)
    found = {}
    for family in SnapshotBuilder(resolve({}), 20_000).build([export], 1_000.0):
        for sample in family.samples:
            if isinstance(sample.value, HistogramValue):
                continue
            optional = len(family.metric.optional_labels)
            names = zip(family.metric.label_names, sample.labels, strict=True)
            labels = ",".join(
                label
                for place, (_, label) in enumerate(names)
                if place and (label or place < len(sample.labels) - optional)
            )
            key = family.metric.prometheus_name.removeprefix("mp_agent_")
            found[f"{key}{{{labels}}}" if labels else key] = sample.value
    return found
