"""The list of checks, in the order of a manual diagnosis. A new check is one entry."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mp_agent.doctor.checks import export, prometheus, runs, settings
from mp_agent.doctor.machine import CheckResult, Machine, unknown


@dataclass(frozen=True, slots=True)
class Check:
    """One question of the list."""

    name: str
    question: str
    examine: Callable[[Machine], Iterable[CheckResult]]


MACHINE_CHECKS = (
    Check("settings", "Which settings are in force?", settings.sources),
    Check("ignored-settings", "Is a setting ignored?", settings.ignored_values),
    Check("variables", "Is a variable not read?", settings.unread_variables),
    Check("kubernetes-service", "Does a Service set the variables?", settings.service_variables),
    Check("enabled", "Is mp_agent enabled?", settings.enabled),
    Check("node-agent-setting", "Who starts the node agent?", settings.node_agent),
    Check("exporters", "Which exporters are on?", settings.exporters),
    Check("access", "Do TLS and password settings fit together?", settings.port_settings),
    Check("shared-memory", "Can the shared memory be used?", runs.directory),
    Check("removed-rings", "Did something remove a job's rings?", runs.removed_rings),
    Check("runs", "Do ranks write?", runs.runs),
    Check("rings", "Can every ring be read?", runs.rings),
    Check("node-agent", "Does a node agent watch every run?", runs.agents),
    Check("log", "What does its log say?", runs.log_files),
    Check("port", "Does it have its port?", runs.port),
    Check("health", "Does it answer?", export.health),
    Check("metrics", "Does it show series?", export.metrics),
    Check("losses", "Is anything lost?", export.losses),
    Check("unsupported", "Is anything not supported?", export.unsupported),
    Check("root", "Do the nodes reach the root agent?", prometheus.root),
    Check("coverage", "Do the numbers cover all ranks?", prometheus.coverage),
    Check("otlp", "Do pushes have somewhere to go?", export.otlp),
)

PROMETHEUS_CHECKS = (
    Check("prometheus", "Does Prometheus answer?", prometheus.reachable),
    Check("targets", "Does it scrape the node agents?", prometheus.targets),
    Check("series", "Does it have their series?", prometheus.series),
    Check("rules", "Are the alert rules loaded?", prometheus.rules),
    Check("alertmanager", "Do alerts go anywhere?", prometheus.delivery),
    Check("alerts", "Does an alert fire?", prometheus.alerts),
)


def examine(machine: Machine) -> Iterator[tuple[Check, list[CheckResult]]]:
    """Yield each check with its results; those of Prometheus only if its URL was given."""
    further = PROMETHEUS_CHECKS if machine.prometheus else ()
    for check in (*MACHINE_CHECKS, *further):
        yield check, _examined(check, machine)


def _examined(check: Check, machine: Machine) -> list[CheckResult]:
    try:
        return list(check.examine(machine))
    except Exception as error:
        return [unknown(f"the check failed: {type(error).__name__}: {error}")]
