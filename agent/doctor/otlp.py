"""Checks of what the OTLP exporter is told by the standard variables."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from mp_agent.doctor.finding import Finding, ok, unknown, wrong
from mp_agent.doctor.machine import Machine
from mp_agent.doctor.reach import unreachable

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PORTS = {"https": 443, "http": 80}


def otlp(machine: Machine) -> Iterator[Finding]:
    """See whether pushes have somewhere to go."""
    environ = machine.environ
    if "otlp" not in machine.settings.exporters:
        yield ok("exporters lacks otlp: nothing is pushed")
        return
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield wrong("OTEL_SDK_DISABLED is true: nothing is pushed", "unset it")
    if environ.get("OTEL_METRICS_EXPORTER", "").strip().lower() == "none":
        yield wrong("OTEL_METRICS_EXPORTER is none: no metrics are pushed", "unset it")
    named = next((name for name in _ENDPOINTS if environ.get(name)), "")
    if not named:
        yield unknown(
            f"neither {' nor '.join(_ENDPOINTS)} is set: pushes go to this machine",
            "set OTEL_EXPORTER_OTLP_ENDPOINT in the job's environment",
        )
    yield _reached(environ[named] if named else f"http://localhost:{_default_port(machine)}")


def _default_port(machine: Machine) -> int:
    chosen = (machine.environ.get(name) for name in _PROTOCOLS)
    return 4317 if next(filter(None, chosen), "") == "grpc" else 4318


def _reached(endpoint: str) -> Finding:
    # The address without user, password and query, which may be secrets.
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError as error:
        return wrong(f"the OTLP endpoint is no address: {error}", "give scheme, host and port")
    if not host or not port:
        return wrong("the OTLP endpoint is no address", "give scheme, host and port")
    if problem := unreachable(host, port):
        return wrong(
            f"nothing takes OTLP at {host}, port {port}: {problem}",
            "see whether the collector runs and can be reached from this machine",
        )
    return ok(f"something listens at {host}, port {port}")
