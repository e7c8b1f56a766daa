"""Checks of the OTLP exporter's configuration by the standard variables."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from mp_agent.doctor.captured_logs import captured_warnings
from mp_agent.doctor.check_result import CheckResult, ok, unknown, wrong
from mp_agent.doctor.fetch import connection_problem, proxy_problem
from mp_agent.doctor.machine import Machine
from mp_agent.exporters.otlp.environment import OtlpSignal, read_environment, variable_names
from mp_agent.inputs.addresses import is_loopback

_OWN, _COMMON = variable_names(OtlpSignal.METRICS, "ENDPOINT")
_GRPC_PORT, _HTTP_PORT = 4317, 4318
_METRICS_PATH = "/v1/metrics"
_SIGNAL_PATHS = (_METRICS_PATH, "/v1/logs", "/v1/traces")
_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """Destination of metrics; without user, password and query, which may be secret."""

    variable: str
    """The variable that sets it; empty for the default."""
    grpc: bool
    host: str
    port: int
    path: str
    scheme: str


def otlp(machine: Machine) -> Iterator[CheckResult]:
    """Check that pushes have a reachable destination."""
    if "otlp" not in machine.settings.exporters:
        yield ok("exporters lacks otlp: nothing is pushed")
        return
    variables = dict(machine.environ)
    with captured_warnings(logging.getLogger("mp_agent.otlp")) as warnings:
        environment = read_environment(variables)
    for problem in warnings:
        yield unknown(problem, "correct the value, if it is meant for mp-agent")
    if OtlpSignal.METRICS not in environment.transports:
        disabled = variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        switch = "OTEL_SDK_DISABLED is true" if disabled else "OTEL_METRICS_EXPORTER is none"
        yield wrong(f"{switch}: no metrics are pushed", "unset it")
        return
    try:
        endpoint = _endpoint(variables, grpc=environment.transports[OtlpSignal.METRICS].grpc)
    except ValueError as error:
        yield wrong(f"the OTLP endpoint is no address: {error}", "give scheme, host and port")
        return
    if not endpoint.variable:
        yield unknown(
            f"neither {_OWN} nor {_COMMON} is set: pushes go to this machine",
            f"set {_COMMON} in the job's environment",
        )
    yield from _traps(endpoint)
    proxy = _proxy(endpoint, variables)
    yield _reached_through(proxy, endpoint) if proxy else _reached(endpoint)


def _endpoint(variables: Mapping[str, str], *, grpc: bool) -> OtlpEndpoint:
    """Return the destination of metrics. Raises ValueError, without quoting an invalid one."""
    variable = next((name for name in (_OWN, _COMMON) if name in variables), "")
    address = variables.get(variable, f"http://localhost:{_GRPC_PORT if grpc else _HTTP_PORT}")
    if "://" not in address:
        if not grpc:
            raise ValueError("over HTTP it needs a scheme")
        address = f"https://{address}"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("its host or port cannot be read") from None
    if parts.scheme not in _PORTS or not host:
        raise ValueError("no http or https URL with a host")
    return OtlpEndpoint(
        variable,
        grpc,
        host,
        port or _PORTS[parts.scheme],
        parts.path.rstrip("/"),
        parts.scheme,
    )


def _traps(endpoint: OtlpEndpoint) -> Iterator[CheckResult]:
    """Detect common mistakes in an endpoint."""
    own, common = endpoint.variable == _OWN, endpoint.variable == _COMMON
    if not endpoint.grpc and common and endpoint.path.endswith(_SIGNAL_PATHS):
        yield wrong(
            f"{_COMMON} ends in the path of a signal, which is appended to it once more",
            f"leave that path out, or set {_OWN} instead",
        )
    if not endpoint.grpc and own and not endpoint.path.endswith(_METRICS_PATH):
        yield unknown(
            f"{_OWN} is used unchanged, and does not end in {_METRICS_PATH}",
            f"set {_COMMON} instead, or write the whole path",
        )
    other, port = ("http/protobuf", _HTTP_PORT) if endpoint.grpc else ("grpc", _GRPC_PORT)
    if endpoint.port == port:
        yield unknown(
            f"port {port} is usually that of the protocol {other}, which is not in force",
            f"set OTEL_EXPORTER_OTLP_PROTOCOL={other}, or name the other port",
        )


def _proxy(endpoint: OtlpEndpoint, variables: Mapping[str, str]) -> str:
    """Return the proxy that pushes go through; "" for none, as to this machine."""
    proxies = {
        name.lower().removesuffix("_proxy"): value
        for name, value in sorted(variables.items())
        if name.lower().endswith("_proxy") and value
    }
    if is_loopback(endpoint.host) or proxy_bypass_environment(endpoint.host, proxies):
        return ""
    kinds = ("grpc", "https", "http") if endpoint.grpc else (endpoint.scheme, "all")
    return next((proxies[kind] for kind in kinds if kind in proxies), "")


def _reached_through(proxy: str, endpoint: OtlpEndpoint) -> CheckResult:
    """Ask through the proxy; of gRPC only whether it lets such a connection be made."""
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        where = f"the proxy {parts.hostname}, port {parts.port or _PORTS['http']}"
    except ValueError:
        return wrong("the proxy for pushes is no address", "correct the variables *_proxy")
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    problem = (
        connection_problem(parts.hostname or "", parts.port or _PORTS["http"])
        if endpoint.grpc
        else proxy_problem(f"{endpoint.scheme}://{host}:{endpoint.port}{endpoint.path}", proxy)
    )
    if problem:
        return wrong(
            f"pushes to {endpoint.host}, port {endpoint.port}, go through {where}: {problem}",
            f"name {endpoint.host} in no_proxy of the job's environment, if the collector is to be "
            "reached without it",
        )
    return ok(f"{where} passes pushes on to {endpoint.host}, port {endpoint.port}")


def _reached(endpoint: OtlpEndpoint) -> CheckResult:
    where = f"{endpoint.host}, port {endpoint.port}"
    if problem := connection_problem(endpoint.host, endpoint.port):
        return wrong(
            f"nothing takes OTLP at {where}: {problem}",
            "see whether the collector runs and can be reached from this machine",
        )
    return ok(f"something listens at {where}")
