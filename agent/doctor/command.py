"""`mp-agent doctor`: runs the checks and prints their results, or JSON."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from mp_agent.doctor.checks import Check, examine
from mp_agent.doctor.machine import CheckResult, CheckStatus, Machine, settings_and_ignored
from mp_agent.errors import SourceError
from mp_agent.inputs.addresses import address_of, shown_address
from mp_agent.node.leftovers import clear_leftovers
from mp_agent.output import Console

_STYLES = {CheckStatus.OK: "green", CheckStatus.WRONG: "bold red", CheckStatus.UNKNOWN: "yellow"}
_VERDICT_WIDTH = 9

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
