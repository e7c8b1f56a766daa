"""What may lie between a node agent and the rules: scrapes that fail, targets that double or move.

Each effect turns what a scraper would have recorded into what it has under that effect. NaN is a
sample that was not taken, so that the series does not end.
"""

from collections.abc import Callable
from dataclasses import replace
from math import nan
from random import Random

from tests.alerting.noise.replay import SCRAPE_SECONDS, Recording, Series

Effect = Callable[[Recording], Recording]

Values = list[float | None]


def missed(share: float) -> Effect:
    """Let a share of the scrapes fail."""

    def under(recording: Recording) -> Recording:
        random = Random(recording.scenario.name)
        failed = {tick for tick in range(recording.scrapes) if random.random() < share}
        return _changed(
            recording,
            lambda name, values: [
                (0.0 if name == "up" else None) if tick in failed and value is not None else value
                for tick, value in enumerate(values)
            ],
        )

    return under


def away(from_minute: float, to_minute: float) -> Effect:
    """Let the Prometheus be down for a while."""
    first, last = _tick(from_minute), _tick(to_minute)

    def under(recording: Recording) -> Recording:
        return _changed(
            recording,
            lambda name, values: [
                nan if first <= tick < last else value for tick, value in enumerate(values)
            ],
        )

    return under


def begun(minute: float) -> Effect:
    """Let the Prometheus start, with an empty store, when the run is so old."""
    first = _tick(minute)

    def under(recording: Recording) -> Recording:
        return _changed(
            recording,
            lambda name, values: [
                value if tick >= first else None for tick, value in enumerate(values)
            ],
        )

    return under


def every(seconds: float) -> Effect:
    """Scrape less often."""
    step = round(seconds / SCRAPE_SECONDS)

    def under(recording: Recording) -> Recording:
        return _changed(
            recording,
            lambda name, values: [
                nan if tick % step and value is not None else value
                for tick, value in enumerate(values)
            ],
        )

    return under


def doubled(**labels: str) -> Effect:
    """Have each series twice, once with other labels that a scraper gives."""

    def under(recording: Recording) -> Recording:
        copies = {
            (name, _relabelled(pairs, labels)): list(values)
            for (name, pairs), values in recording.samples.items()
        }
        return replace(recording, samples={**recording.samples, **copies})

    return under


def moved(minute: float, instance: str) -> Effect:
    """Let the targets have another address from a minute on."""
    first = _tick(minute)

    def under(recording: Recording) -> Recording:
        samples: dict[Series, Values] = {}
        for (name, pairs), values in recording.samples.items():
            later = (name, _relabelled(pairs, {"instance": instance}))
            samples[name, pairs] = [v if t < first else None for t, v in enumerate(values)]
            samples[later] = [v if t >= first else None for t, v in enumerate(values)]
        return replace(recording, samples=samples)

    return under


def clock_stepped(minute: float, seconds: float) -> Effect:
    """Set the clocks of the nodes to another time from a minute on; the scraper's goes on."""
    first = _tick(minute)

    def under(recording: Recording) -> Recording:
        return _changed(
            recording,
            lambda name, values: [
                value + seconds
                if name.endswith("_timestamp_seconds") and tick >= first and value is not None
                else value
                for tick, value in enumerate(values)
            ],
        )

    return under


def _changed(recording: Recording, change: Callable[[str, Values], Values]) -> Recording:
    samples = {key: change(key[0], values) for key, values in recording.samples.items()}
    return replace(recording, samples=samples)


def _relabelled(
    pairs: tuple[tuple[str, str], ...], labels: dict[str, str]
) -> tuple[tuple[str, str], ...]:
    return tuple({**dict(pairs), **labels}.items())


def _tick(minute: float) -> int:
    return round(minute * 60 / SCRAPE_SECONDS)
