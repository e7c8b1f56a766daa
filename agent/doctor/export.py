"""Checks of the agent's endpoint and of what it pushes by OTLP."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.doctor.machine import (
    CheckResult,
    Machine,
    captured_warnings,
    connection_problem,
    ok,
    proxy_problem,
    unknown,
    wrong,
)
from mp_agent.exporters.otlp.environment import OtlpSignal, read_environment, variable_names
from mp_agent.inputs.addresses import is_loopback
from mp_agent.inputs.http import Answer

_NO_AGENT = "no node agent to ask"
_BUILD = BY_PROMETHEUS_NAME["mp_agent_build_info"].prometheus_name
_UNSUPPORTED = BY_PROMETHEUS_NAME["mp_agent_unsupported_info"].prometheus_name


@dataclass(frozen=True, slots=True)
class Loss:
    """A counter that is 0 unless something was lost."""

    metric: str
    remedy: str

    def __post_init__(self) -> None:
        if self.metric not in BY_PROMETHEUS_NAME:
            raise KeyError(self.metric)


LOSSES = (
    Loss("mp_agent_probe_errors_total", "each kind of error is in the job's log, once"),
    Loss("mp_agent_setting_errors_total", "the job's log names each ignored setting"),
    Loss(
        "mp_agent_records_dropped_total",
        "the node agent gets too little CPU, or the shared memory is full",
    ),
    Loss(
        "mp_agent_series_dropped_total",
        "raise MP_AGENT_MAX_SERIES, and sample_limit of the scrape with it",
    ),
    Loss(
        "mp_agent_export_failures_total",
        "the node agent's log says why pushes by OTLP or to a tracker do not arrive",
    ),
    Loss(
        "mp_agent_push_failures_total",
        "the node agent's log says why the root agent did not accept its rows",
    ),
    Loss("mp_agent_reports_dropped_total", "the root agent cannot take reports of this size"),
    Loss(
        "mp_agent_rows_refused_total",
        "give all nodes the same MP_AGENT_TOKEN and one version of mp-agent",
    ),
    Loss("mp_agent_flight_errors_total", "MP_AGENT_FLIGHT_DIR is full, or not this user's"),
)


def health(machine: Machine) -> Iterator[CheckResult]:
    """Check /healthz."""
    for exposition in machine.expositions:
        answer = exposition.health
        if answer.ok:
            yield ok(f"{exposition.url}/healthz answers")
        else:
            yield wrong(f"{exposition.url}/healthz: {answer.problem}", _remedy(answer))
    if not machine.expositions:
        yield unknown(_NO_AGENT, "give its address by --scrape")


def metrics(machine: Machine) -> Iterator[CheckResult]:
    """Check that /metrics is served by mp_agent."""
    for exposition in machine.expositions:
        answer, runs = exposition.metrics, [labels for labels, _ in exposition.values(_BUILD)]
        if not answer.ok:
            yield wrong(f"{exposition.url}/metrics: {answer.problem}", _remedy(answer))
        elif runs:
            names = ", ".join(sorted({labels.get("run", "") for labels in runs} - {""}))
            of = f"of {names}" if names else "of the node agent alone, which has no run"
            yield ok(f"{exposition.url}/metrics: {len(exposition.samples)} series, {of}")
        else:
            yield wrong(
                f"{exposition.url}/metrics holds no {_BUILD}",
                "another program answers there, or no rank of a run has started yet",
            )
    if not machine.expositions:
        yield unknown(_NO_AGENT)


def _remedy(answer: Answer) -> str:
    if answer.status == 401:
        return "set MP_AGENT_BASIC_AUTH_USER and MP_AGENT_BASIC_AUTH_PASSWORD as the agent has them"
    if answer.status:
        return "another program answers there, or exporters lacks prometheus"
    if "certificate" in answer.problem:
        return "set MP_AGENT_TLS_CA to the authority; where clients need one, a certificate too"
    return "check that the node agent is alive, that bind permits the connection, and the firewall"


def losses(machine: Machine) -> Iterator[CheckResult]:
    """Report nonzero counters of losses."""
    counted = [
        wrong(f"{loss.metric} is {value:g} in run {labels.get('run', '')}", loss.remedy)
        for exposition in machine.expositions
        for loss in LOSSES
        for labels, value in exposition.values(loss.metric)
        if value > 0 and machine.run in ("", labels.get("run"))
    ]
    yield from counted
    if not _any_samples(machine):
        yield unknown(_NO_AGENT)
    elif not counted:
        yield ok("nothing was lost")


def unsupported(machine: Machine) -> Iterator[CheckResult]:
    """Report features in use that the probe cannot measure."""
    met = [
        unknown(f"run {labels['run']}: {labels['feature']} is not supported")
        for exposition in machine.expositions
        for labels, _ in exposition.values(_UNSUPPORTED)
        if machine.run in ("", labels["run"])
    ]
    yield from met
    if not _any_samples(machine):
        yield unknown(_NO_AGENT)
    elif not met:
        yield ok("the probe met nothing that it cannot measure")


def _any_samples(machine: Machine) -> bool:
    return any(exposition.samples for exposition in machine.expositions)


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
