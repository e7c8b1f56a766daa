"""Since when a cumulative value counts: from the run's birth, or from the last time it fell."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.catalog.metric import Kind
from mp_agent.catalog.snapshot import HistogramValue, Sample, Snapshot

Key = tuple[str, tuple[str, ...]]
"""OpenTelemetry name and label values: one series."""

CUMULATIVE = frozenset({Kind.COUNTER, Kind.HISTOGRAM})


@dataclass(slots=True)
class StartTimes:
    """Remembers the counters of the last snapshot, to see when one begins anew."""

    _levels: dict[Key, float] = field(default_factory=dict)
    _restarts_unix_ns: dict[Key, int] = field(default_factory=dict)
    _last_unix_ns: int = 0

    def follow(self, snapshot: Snapshot, time_unix_ns: int) -> Mapping[Key, int]:
        """Return when counters fell, in nanoseconds since the epoch, for those that ever did.

        A counter that fell began anew after the snapshot before, at the earliest.
        """
        levels: dict[Key, float] = {}
        for family in snapshot:
            if family.metric.kind in CUMULATIVE:
                for sample in family.samples:
                    key = (family.metric.name, sample.labels)
                    level = levels[key] = _level(sample)
                    if level < self._levels.get(key, 0.0):
                        self._restarts_unix_ns[key] = self._last_unix_ns
        self._restarts_unix_ns = {
            key: start for key, start in self._restarts_unix_ns.items() if key in levels
        }
        self._levels, self._last_unix_ns = levels, time_unix_ns
        return self._restarts_unix_ns


def _level(sample: Sample) -> float:
    """Return what of a cumulative value may only rise."""
    if isinstance(sample.value, HistogramValue):
        return float(sample.value.cumulative_counts[-1])
    return sample.value
