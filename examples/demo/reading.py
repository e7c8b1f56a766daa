"""What the node agent says on /metrics at one moment."""

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME

_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples of one scrape by name, each with its labels."""

    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the first sample of `name` with these labels, or None. Unknown names raise."""
        for own, value in self.all(name):
            if labels.items() <= dict(own).items():
                return value
        return None

    def count(self, name: str, **labels: str) -> float:
        """Return a counter's value; one that is absent has counted nothing."""
        return self.value(name, **labels) or 0.0

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the values of all samples of `name` by one of their labels."""
        return {own[label]: value for own, value in self.all(name)}

    def labels_of(self, name: str) -> list[Mapping[str, str]]:
        """Return the labels of every sample of `name`."""
        return [own for own, _ in self.all(name)]

    def all(self, name: str) -> tuple[tuple[Mapping[str, str], float], ...]:
        """Return every sample of `name` with its labels."""
        return self.samples.get(BY_PROMETHEUS_NAME[name].prometheus_name, ())


def read_metrics(url: str) -> Reading | None:
    """Scrape a node agent; None when it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_SECONDS) as response:
            text = response.read().decode()
    except OSError:
        return None
    return parse(text)


def parse(text: str) -> Reading:
    """Return the samples of Prometheus' text format."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Reading({name: tuple(found) for name, found in samples.items()})
