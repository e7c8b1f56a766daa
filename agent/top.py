"""`mp-agent top`: the status page in a terminal, of node agents here or elsewhere."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from mp_agent.doctor.machine import fetch_from_agent
from mp_agent.exporters.status_page.report import FORMAT
from mp_agent.exporters.status_page.terminal import LAYER_SORTS, run_panel
from mp_agent.inputs.addresses import shown_address
from mp_agent.inputs.http import Answer
from mp_agent.node.leftovers import clear_leftovers
from mp_agent.output import Console
from mp_agent.report.options import FiniteRange
from mp_agent.ring import locations
from mp_agent.settings import Settings, load_settings

_UNAUTHORIZED = 401


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What to show of a node agent."""

    settings: Settings
    run: str | None
    sort: str
    layers: int


class _InvalidAnswer(Exception):
    """A node agent gave no usable answer; says why."""


@click.command("top")
@click.option("--url", help="Address of a node agent; those of this machine by default.")
@click.option("--run", "run_name", help="Show this run alone.")
@click.option(
    "--interval",
    type=FiniteRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option(
    "--sort",
    type=click.Choice(LAYER_SORTS),
    default="grad_norm",
    show_default=True,
    help="What the layers are sorted by, the largest first.",
)
@click.option(
    "--layers", type=click.IntRange(min=0), default=12, show_default=True, help="Layers shown."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print what the agents report as JSON, once, and exit as with --once.",
)
@click.option("--once", is_flag=True, help="Print once and exit; exit with 1 if no agent answers.")
def top_command(
    url: str | None,
    run_name: str | None,
    interval: float,
    sort: str,
    layers: int,
    as_json: bool,
    once: bool,
) -> None:
    """Show the runs of a node agent, updated until Ctrl-C.

    TLS and password come from the settings, as for the agents themselves.
    """
    settings, _ = load_settings()
    clear_leftovers(settings.dir)
    urls = [_address(url)] if url else local_agents(settings)
    if not urls:
        raise click.ClickException(
            "no node agent of this user runs on this machine; name one with --url"
        )
    wanted = _Wanted(settings, run_name, sort, layers)
    if as_json:
        reports = [_as_json(address, wanted) for address in urls]
        click.echo(json.dumps(reports, indent=2))
        raise SystemExit(0 if any("problem" not in report for report in reports) else 1)
    if once:
        parts = [_agent(address, wanted) for address in urls]
        Console().print(Group(*(part for part, _ in parts)))
        raise SystemExit(0 if any(answered for _, answered in parts) else 1)
    try:
        with Live(_picture(urls, wanted), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_picture(urls, wanted), refresh=True)
    except KeyboardInterrupt:
        return


def local_agents(settings: Settings) -> list[str]:
    """Return the addresses of this machine's node agents, with a run or waiting for one."""
    base = settings.dir
    found = [locations.read_status(run) for run in locations.find_runs(base)]
    if locations.agent_running(base):
        found.append(locations.read_status(base))
    return sorted({status.url for status in found if status is not None and status.url})


def _address(url: str) -> str:
    """Return an address with its scheme, which is often omitted."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def _as_json(url: str, wanted: _Wanted) -> dict[str, Any]:
    """Return a node agent's report of the runs that are wanted, or what is wrong with it."""
    shown = shown_address(url)
    try:
        report = _ask(f"{url}/api/v1/snapshot", wanted.settings)
        runs = [run for run in report["runs"] if wanted.run in (None, run["run"])]
    except _InvalidAnswer as error:
        return {"url": shown, "problem": str(error)}
    except (KeyError, TypeError):
        return {"url": shown, "problem": "answers what cannot be read"}
    if wanted.run and not runs:
        return {"url": shown, "problem": f"knows no run {wanted.run!r}"}
    return {"url": shown, **report, "runs": runs}


def _picture(urls: list[str], wanted: _Wanted) -> RenderableType:
    return Group(*(_agent(url, wanted)[0] for url in urls))


def _agent(url: str, wanted: _Wanted) -> tuple[RenderableType, bool]:
    """Return the picture of a node agent, and whether it has anything to show."""
    shown = shown_address(url)
    try:
        report = _ask(f"{url}/api/v1/snapshot", wanted.settings)
        runs = [run for run in report["runs"] if wanted.run in (None, run["run"])]
        if not runs:
            if wanted.run:
                return Text(f"{shown} knows no run {wanted.run!r}", style="yellow"), False
            return Text(f"{shown}: a node agent that waits for jobs; it has no run"), True
        return Group(*(_run(url, run, report, wanted) for run in runs)), True
    except _InvalidAnswer as error:
        return Text(f"{shown} {error}", style="red"), False
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return Text(f"{shown} answers what cannot be read: {error!r}", style="red"), False


def _run(
    url: str, run: Mapping[str, Any], report: Mapping[str, Any], wanted: _Wanted
) -> RenderableType:
    history = None
    if run["is_root"]:
        history = _ask(
            f"{url}/api/v1/history", wanted.settings, f"run={quote(run['run'], safe='')}"
        )
    return run_panel(
        run,
        history,
        report["thresholds"],
        sort=wanted.sort,
        layers=wanted.layers,
        now_unix_seconds=report["time_unix_seconds"],
        url=shown_address(url),
    )


def _ask(url: str, settings: Settings, query: str = "") -> dict[str, Any]:
    """Return a node agent's answer. Raises _InvalidAnswer if this version cannot read it."""
    answer = fetch_from_agent(url, settings, query)
    if not answer.ok:
        raise _InvalidAnswer(f"does not answer: {_problem(answer)}")
    try:
        report = json.loads(answer.body)
        spoken = report["format"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _InvalidAnswer("is not a node agent, or one of another version") from None
    if spoken != FORMAT:
        raise _InvalidAnswer(
            f"answers in JSON format {spoken}; this mp-agent reads format {FORMAT}"
        )
    return dict(report)


def _problem(answer: Answer) -> str:
    if answer.status == _UNAUTHORIZED:
        return (
            "it requires a user and a password: set MP_AGENT_BASIC_AUTH_USER and "
            "MP_AGENT_BASIC_AUTH_PASSWORD"
        )
    return answer.problem or f"status {answer.status}"
