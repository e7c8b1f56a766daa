"""Checks of the node agents' endpoints, and of their counters of losses."""

from collections.abc import Iterator
from dataclasses import dataclass

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.doctor.check_result import CheckResult, ok, unknown, wrong
from mp_agent.doctor.machine import Machine
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
