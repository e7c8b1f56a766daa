"""Reads the standard OTEL_* variables that the official exporters do not read themselves.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/ lists them. Headers, endpoints and
certificates are left to the exporters, so no secret is kept here.
"""

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from math import isfinite

log = logging.getLogger("mp_agent.otlp")

DEFAULT_INTERVAL_SECONDS = 15.0
"""Prometheus' scrape interval. The specification's minute would leave rules two points a window."""
DEFAULT_TIMEOUT_SECONDS = 10.0
DEFAULT_EXPORT_TIMEOUT_SECONDS = 30.0

_HTTP = "http/protobuf"
_PROTOCOLS = (_HTTP, "grpc")
_COMPRESSIONS = ("none", "gzip", "deflate")
_MILLISECONDS = 1e-3
_FIXED_VALUES = {
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "cumulative",
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "explicit_bucket_histogram",
}
"""Variables for instruments, each with the only value that is supported here."""


class OtlpSignal(Enum):
    """What OTLP can carry. The value is the word in the variables' names."""

    METRICS = "METRICS"
    LOGS = "LOGS"
    TRACES = "TRACES"


def variable_names(signal: OtlpSignal, what: str) -> tuple[str, str]:
    """Return the signal's own variable, which wins, and the one for all signals."""
    return f"OTEL_EXPORTER_OTLP_{signal.value}_{what}", f"OTEL_EXPORTER_OTLP_{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpTransport:
    """How one signal is sent."""

    signal: OtlpSignal
    grpc: bool
    gzip_over_grpc: bool
    """Unused over HTTP, where the exporter reads the compression itself."""
    timeout_seconds: float
    """For one request, including retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpEnvironment:
    """The variables' values, with defaults."""

    transports: Mapping[OtlpSignal, OtlpTransport]
    """Of the signals that are enabled."""
    interval_seconds: float
    export_timeout_seconds: float
    """For all requests of one push."""


def read_environment(variables: MutableMapping[str, str]) -> OtlpEnvironment:
    """Return what `variables` configure; an invalid value is logged, and the default used.

    Removes from `variables` what the exporters cannot handle: empty values, which count as unset,
    and invalid ones.
    """
    _drop_empty(variables)
    disabled = _is_disabled(variables)
    for name, only in _FIXED_VALUES.items():
        if variables.get(name, only).strip().lower() != only:
            log.warning("%s is ignored: metrics are always sent as %s", name, only)
    limit_seconds = _seconds(
        variables, "OTEL_METRIC_EXPORT_TIMEOUT", DEFAULT_EXPORT_TIMEOUT_SECONDS, _MILLISECONDS
    )
    interval_seconds = _seconds(
        variables, "OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_SECONDS, _MILLISECONDS
    )
    return OtlpEnvironment(
        transports={
            signal: _transport(variables, signal, limit_seconds)
            for signal in OtlpSignal
            if not disabled and _is_on(variables, signal)
        },
        interval_seconds=interval_seconds,
        export_timeout_seconds=limit_seconds,
    )


def _transport(
    variables: MutableMapping[str, str], signal: OtlpSignal, limit_seconds: float
) -> OtlpTransport:
    grpc = _choice(variables, signal, "PROTOCOL", _PROTOCOLS, _HTTP) == "grpc"
    compression = _choice(variables, signal, "COMPRESSION", _COMPRESSIONS, "none")
    if grpc and compression == "deflate":
        log.warning("%s are sent uncompressed: gRPC does not support deflate", signal.name.lower())
    timeout_seconds = DEFAULT_TIMEOUT_SECONDS
    for name in reversed(variable_names(signal, "TIMEOUT")):
        # Seconds, as everywhere in Python's exporters; the specification says milliseconds.
        timeout_seconds = _seconds(variables, name, timeout_seconds, 1.0)
    return OtlpTransport(
        signal=signal,
        grpc=grpc,
        gzip_over_grpc=grpc and compression == "gzip",
        timeout_seconds=min(timeout_seconds, limit_seconds),
    )


def _is_disabled(variables: Mapping[str, str]) -> bool:
    value = variables.get("OTEL_SDK_DISABLED", "false").strip().lower()
    if value not in ("true", "false"):
        log.warning("OTEL_SDK_DISABLED has value %r: must be true or false", value)
    return value == "true"


def _is_on(variables: Mapping[str, str], signal: OtlpSignal) -> bool:
    return variables.get(f"OTEL_{signal.value}_EXPORTER", "").strip().lower() != "none"


def _choice(
    variables: MutableMapping[str, str],
    signal: OtlpSignal,
    what: str,
    known: tuple[str, ...],
    default: str,
) -> str:
    for name in variable_names(signal, what):
        if name not in variables:
            continue
        value = variables[name].strip().lower()
        if value in known:
            return value
        log.warning("%s has value %r: known are %s", name, value, ", ".join(known))
        del variables[name]
    return default


def _seconds(
    variables: MutableMapping[str, str], name: str, default_seconds: float, unit_seconds: float
) -> float:
    if name not in variables:
        return default_seconds
    try:
        seconds = float(variables[name]) * unit_seconds
    except ValueError:
        seconds = 0.0
    if isfinite(seconds) and seconds > 0:
        return seconds
    log.warning("%s has value %r: must be a number above 0", name, variables.pop(name))
    return default_seconds


def _drop_empty(variables: MutableMapping[str, str]) -> None:
    for name in [name for name in variables if name.startswith("OTEL_")]:
        if not variables[name].strip():
            del variables[name]
