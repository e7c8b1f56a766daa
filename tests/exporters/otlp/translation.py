"""Prometheus' own rules for OTLP, ported: from requests to series as they are stored.

Names: otlptranslator's `UnderscoreEscapingWithSuffixes`. Labels: attributes of the data points,
characters escaped; an empty label is no label. Histograms: cumulative buckets, sum and count.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_UNITS = {
    **{"d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds"},
    **{"By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "m": "meters", "V": "volts"},
    **{"J": "joules", "W": "watts", "g": "grams", "Cel": "celsius", "Hz": "hertz"},
    **{"1": "", "%": "percent"},
}
_PER = {"s": "second", "m": "minute", "h": "hour", "d": "day"}
_NO_RECORDED_VALUE = 1

Labels = frozenset[tuple[str, str]]
Series = dict[tuple[str, Labels], float]


def name_of(name: str, unit: str, *, monotonic: bool, gauge: bool) -> str:
    words = [word for word in re.split(r"[^a-zA-Z0-9:]+", name) if word]
    main, per = _unit_words(unit)
    words += [word for word in (main, per) if word and word not in words]
    if monotonic:
        words = [word for word in words if word != "total"] + ["total"]
    if unit == "1" and gauge:
        words = [word for word in words if word != "ratio"] + ["ratio"]
    joined = "_".join(words)
    return f"_{joined}" if joined[:1].isdigit() else joined


def _unit_words(unit: str) -> tuple[str, str]:
    main, _, per = unit.partition("/")
    main, per = main.strip(), per.strip()
    first = "" if not main or "{" in main or "}" in main else _UNITS.get(main, main)
    second = "" if not per or "{" in per or "}" in per else f"per_{_PER.get(per, per)}"
    return first, second


def stored(requests: Iterable[Any]) -> Series:
    """Return what is stored as current after the requests, in their order."""
    series: Series = {}
    for request in requests:
        for metric in _metrics(request):
            kind = metric.WhichOneof("data")
            data = getattr(metric, kind)
            name = name_of(
                metric.name,
                metric.unit,
                monotonic=kind == "sum" and data.is_monotonic,
                gauge=kind == "gauge",
            )
            for point in data.data_points:
                for key, value in _samples(name, kind, point):
                    if point.flags & _NO_RECORDED_VALUE:
                        series.pop(key, None)
                    else:
                        series[key] = value
    return series


def _metrics(request: Any) -> Iterator[Any]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def _samples(name: str, kind: str, point: Any) -> Iterator[tuple[tuple[str, Labels], float]]:
    own = attributes_of(point)
    if kind != "histogram":
        yield (name, labels(own)), point.as_double
        return
    below = 0
    for index, count in enumerate(point.bucket_counts):
        below += count
        bound = point.explicit_bounds[index] if index < len(point.explicit_bounds) else None
        le = "+Inf" if bound is None else f"{bound!r}"
        yield (f"{name}_bucket", labels({**own, "le": le})), below
    yield (f"{name}_sum", labels(own)), point.sum
    yield (f"{name}_count", labels(own)), point.count


def attributes_of(message: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in message.attributes
    }


def labels(named: Mapping[str, str]) -> Labels:
    """Return labels as Prometheus stores them."""
    return frozenset(
        (re.sub(r"[^a-zA-Z0-9_]", "_", name), value) for name, value in named.items() if value
    )
