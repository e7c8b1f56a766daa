"""The OTEL_* variables, and how secrets in them are kept out of the logs.

Keeps secrets out of the logs: OTEL_* headers, passwords and queries of endpoints.
The exporters log headers that they cannot parse and URLs that they cannot reach. While a capture
is installed, their messages are kept here, redacted, and are read when a push fails.

Reads the standard OTEL_* variables that the official exporters do not read themselves.
https://opentelemetry.io/docs/specs/otel/protocol/exporter/ lists them. Headers, endpoints and
certificates are left to the exporters, so no secret is kept here.
"""

import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from urllib.parse import parse_qsl, unquote

LOGGERS = ("opentelemetry", "urllib3", "requests")
"""Loggers of the exporters and the libraries they use."""

_SHOWN = "***"
_LENGTH_MIN = 3
"""Shorter words are no secrets, and replacing them would garble every message."""
_MESSAGES_KEPT = 4
_MESSAGE_CHARACTERS_MAX = 500


class Redactor:
    """Replaces, in any text, the secrets that the OTEL_* variables hold."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        words = {word for word in _secrets(variables) if len(word) >= _LENGTH_MIN}
        longest_first = sorted(words, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def redact(self, text: str) -> str:
        """Return `text` without the secrets, truncated to a reasonable log line."""
        return self._pattern.sub(_SHOWN, text)[:_MESSAGE_CHARACTERS_MAX]

    def __repr__(self) -> str:
        return "Redactor()"


class LogCapture(logging.Handler):
    """Diverts the exporters' log messages, and keeps each thread's last ones."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__(logging.WARNING)
        self._redactor = redactor
        self._messages: dict[int, deque[str]] = {}
        self._propagated: dict[str, bool] = {}

    def install(self) -> None:
        """Attach to the loggers and stop their propagation; idempotent."""
        for name in LOGGERS:
            if name in self._propagated:
                continue
            logger = logging.getLogger(name)
            self._propagated[name] = logger.propagate
            logger.propagate = False
            logger.addHandler(self)

    def remove(self) -> None:
        """Detach from the loggers and restore their propagation."""
        for name, propagated in self._propagated.items():
            logger = logging.getLogger(name)
            logger.removeHandler(self)
            logger.propagate = propagated
        self._propagated.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message, redacted, with its exception."""
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text = f"{text}: {record.exc_info[1]!r}"
        except Exception:
            # logging's own report of this would show the arguments.
            text = f"{record.name} logged a message that cannot be formatted"
        kept = self._messages.setdefault(threading.get_ident(), deque(maxlen=_MESSAGES_KEPT))
        if (redacted := self._redactor.redact(text)) not in kept:
            kept.append(redacted)

    def redact(self, text: str) -> str:
        """Return `text` without secrets."""
        return self._redactor.redact(text)

    def pop(self) -> str:
        """Return and forget the messages of this thread since the last call, oldest first."""
        return "; ".join(self._messages.pop(threading.get_ident(), ()))


def _secrets(variables: Mapping[str, str]) -> Iterator[str]:
    for name, value in variables.items():
        if not name.startswith("OTEL_EXPORTER_OTLP"):
            continue
        if name.endswith("HEADERS"):
            yield from _header_secrets(value)
        elif name.endswith("ENDPOINT"):
            yield from _url_secrets(value)


def _header_secrets(value: str) -> Iterator[str]:
    """Yield every form in which a header's value may appear, well-formed or not."""
    for pair in value.split(","):
        # Also as a whole: without a name, all of it is the secret.
        yield pair.strip()
        secret = re.split("[=:]", pair, maxsplit=1)[-1].strip()
        for form in {secret, unquote(secret)}:
            yield form
            # `Bearer abc` and `Basic abc`: the second word is the secret.
            yield from form.split()[1:]


def _url_secrets(value: str) -> Iterator[str]:
    """Yield passwords and queries, even of an invalid URL."""
    address, _, query = value.partition("?")
    for userinfo in re.findall(r"[^/\s]+(?=@)", address):
        for part in (userinfo, *userinfo.split(":")):
            yield from (part, unquote(part))
    for _, secret in parse_qsl(query):
        yield secret
    yield query


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
    """Seconds for one request, including retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpEnvironment:
    """The variables' values, with defaults."""

    transports: Mapping[OtlpSignal, OtlpTransport]
    """Transports of the signals that are enabled."""
    interval_seconds: float
    export_timeout_seconds: float
    """Seconds for all requests of one push."""


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
