"""`mp-agent doctor`: runs the checks and prints their results, or JSON.

The checks are in the order of a manual diagnosis. A new one is one entry of the list.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.text import Text

from mp_agent.doctor import export, prometheus, runs, settings
from mp_agent.doctor.machine import CheckResult, CheckStatus, Machine, settings_and_ignored, unknown
from mp_agent.errors import SourceError
from mp_agent.inputs.addresses import address_of, shown_address
from mp_agent.node.leftovers import clear_leftovers
from mp_agent.output import Console

_STYLES = {CheckStatus.OK: "green", CheckStatus.WRONG: "bold red", CheckStatus.UNKNOWN: "yellow"}
_VERDICT_WIDTH = 9


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


Results = Iterable[tuple[Check, list[CheckResult]]]


def _base_url(context: click.Context, option: click.Parameter, value: str) -> str:
    """Return a URL without its path to the metrics; refuse invalid ones."""
    try:
        address_of(value or "http://localhost")
    except SourceError as error:
        raise click.BadParameter(f"{shown_address(value)!r}: {error}") from None
    return value.rstrip("/").removesuffix("/metrics")


@click.command("doctor")
@click.option(
    "--scrape",
    metavar="URL",
    default="",
    callback=_base_url,
    help="Address of a further node agent, in addition to those of this machine.",
)
@click.option(
    "--prometheus",
    metavar="URL",
    default="",
    callback=_base_url,
    help="Address of the Prometheus that scrapes: check it, too.",
)
@click.option("--run", "run_name", metavar="NAME", default="", help="Check this run only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor_command(scrape: str, prometheus: str, run_name: str, as_json: bool) -> None:
    """Diagnose, on a machine that trains, why metrics are missing.

    Run it as the user who trains, with the job's environment, and inside its container.
    The exit code is 0 if nothing is wrong, 1 if something is, 2 for invalid arguments.
    """
    settings, ignored = settings_and_ignored()
    machine = Machine(settings, ignored=ignored, scrape=scrape, prometheus=prometheus, run=run_name)
    results = list(examine(machine))
    if as_json:
        click.echo(json.dumps(_report(results), indent=1))
    else:
        _print(results)
    clear_leftovers(settings.dir)
    sys.exit(int(_count(results, CheckStatus.WRONG) > 0))


def _report(results: Results) -> dict[str, Any]:
    checks = [
        {
            "name": check.name,
            "question": check.question,
            "findings": [
                {**asdict(finding), "verdict": finding.verdict.value} for finding in findings
            ],
        }
        for check, findings in results
    ]
    return {"format": 1, "wrong": _count(results, CheckStatus.WRONG), "checks": checks}


def _print(results: Results) -> None:
    console = Console(soft_wrap=True)
    for check, findings in results:
        console.print(Text(check.question, "bold"))
        for finding in findings:
            word = finding.verdict.value.ljust(_VERDICT_WIDTH)
            console.print(Text.assemble("  ", (word, _STYLES[finding.verdict]), finding.text))
            if finding.remedy:
                console.print(Text(f"  {' ' * _VERDICT_WIDTH}→ {finding.remedy}"))
    wrong = _count(results, CheckStatus.WRONG)
    verdict = f"{wrong} wrong" if wrong else "nothing wrong"
    console.print(Text(f"{verdict}, {_count(results, CheckStatus.UNKNOWN)} unknown", "bold"))


def _count(results: Results, verdict: CheckStatus) -> int:
    return sum(finding.verdict is verdict for _, findings in results for finding in findings)
