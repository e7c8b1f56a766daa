"""Start times of cumulative values: the run's start, or the last reset."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.catalog.metric import Kind
from mp_agent.catalog.snapshot import HistogramValue, Sample, Snapshot

Key = tuple[str, tuple[str, ...]]
"""OpenTelemetry name and label values: one series."""

CUMULATIVE = frozenset({Kind.COUNTER, Kind.HISTOGRAM})


@dataclass(slots=True)
class StartTimes:
    """Remembers the counters of the last snapshot, to detect resets."""

    _levels: dict[Key, float] = field(default_factory=dict)
    _resets_unix_ns: dict[Key, int] = field(default_factory=dict)
    _last_unix_ns: int = 0

    def follow(self, snapshot: Snapshot, time_unix_ns: int) -> Mapping[Key, int]:
        """Return when counters were last reset, in nanoseconds since the epoch, where they were.

        A counter that fell was reset after the previous snapshot, at the earliest.
        """
        levels: dict[Key, float] = {}
        for family in snapshot:
            if family.metric.kind in CUMULATIVE:
                for sample in family.samples:
                    key = (family.metric.name, sample.labels)
                    level = levels[key] = _level(sample)
                    if level < self._levels.get(key, 0.0):
                        self._resets_unix_ns[key] = self._last_unix_ns
        self._resets_unix_ns = {
            key: start for key, start in self._resets_unix_ns.items() if key in levels
        }
        self._levels, self._last_unix_ns = levels, time_unix_ns
        return self._resets_unix_ns


def _level(sample: Sample) -> float:
    """Return the part of a cumulative value that never falls without a reset."""
    if isinstance(sample.value, HistogramValue):
        return float(sample.value.cumulative_counts[-1])
    return sample.value
