"""`mp-agent top`: the status page in a terminal."""

import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mp_agent.ring import locations
from mp_agent.settings import load_settings

_TIMEOUT_SECONDS = 5.0
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "blue"}
LAYER_SORTS = ("layer", "grad_norm", "grad_abs_max", "zero_ratio", "nonfinite_elements")


@click.command("top")
@click.option("--url", help="Address of a node agent; those of this machine by default.")
@click.option("--run", "run_name", help="Show this run alone.")
@click.option("--interval", type=click.FloatRange(min=0.2), default=2.0, show_default=True)
@click.option("--sort", type=click.Choice(LAYER_SORTS), default="grad_norm", show_default=True)
@click.option("--layers", type=click.IntRange(min=0), default=12, show_default=True)
@click.option("--once", is_flag=True, help="Print once and end.")
def top_command(
    url: str | None, run_name: str | None, interval: float, sort: str, layers: int, once: bool
) -> None:
    """Show the runs of a node agent, updated until Ctrl-C."""
    urls = [url.rstrip("/")] if url else local_agents()
    if not urls:
        raise click.ClickException(
            "no node agent of this user runs on this machine; name one with --url"
        )

    def picture() -> RenderableType:
        return Group(*(_agent(address, run_name, sort, layers) for address in urls))

    if once:
        Console().print(picture())
        return
    try:
        with Live(picture(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(picture(), refresh=True)
    except KeyboardInterrupt:
        return


def local_agents() -> list[str]:
    """Return the addresses of the node agents that serve a run of this machine."""
    settings, _ = load_settings()
    found = (locations.read_status(run) for run in locations.find_runs(settings.dir))
    return sorted({status.url for status in found if status is not None and status.url})


def _agent(url: str, run_name: str | None, sort: str, layers: int) -> RenderableType:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/snapshot", timeout=_TIMEOUT_SECONDS) as answer:
            report = json.load(answer)
    except (OSError, ValueError) as error:
        return Text(f"{url} does not answer: {error}", style="red")
    runs = [run for run in report["runs"] if run_name in (None, run["run"])]
    if not runs:
        return Text(f"{url} knows no such run" if run_name else f"{url}: no run yet")
    return Group(*(run_panel(run, sort=sort, layers=layers) for run in runs))


def run_panel(run: Mapping[str, Any], *, sort: str, layers: int) -> Panel:
    """Return one run as a panel: verdict, numbers, conditions, layers, ranks."""
    worst = run["conditions"][0]["severity"] if run["conditions"] else ""
    parts: list[RenderableType] = [Text(run["verdict"], style=_STYLES.get(worst, "bold"))]
    if run["summary"] is not None:
        parts.append(_numbers(run["summary"]))
    for condition in run["conditions"]:
        parts.append(Text(f"{condition['name']} since step {condition['since_step']}", "bold"))
        parts.append(Text(f"  {condition['remedy']}"))
    if layers and run["layers"]:
        parts.append(_layers(run["layers"], sort, layers))
    parts.append(_ranks(run["ranks"]))
    return Panel(Group(*parts), title=escape(run["run"]), border_style=_STYLES.get(worst, ""))


def _numbers(summary: Mapping[str, Any]) -> Text:
    names = ("step", "phase", "loss", "loss_scale", "grad_norm", "learning_rate", "coverage")
    return Text("   ".join(f"{name.replace('_', ' ')} {_short(summary[name])}" for name in names))


def _layers(rows: Sequence[Mapping[str, Any]], sort: str, count: int) -> Table:
    table = Table("layer", box=None, pad_edge=False)
    for title in ("norm", "largest", "zeros", "non-finite"):
        table.add_column(title, justify="right")
    known = [row for row in rows if row[sort] is not None]
    unknown = [row for row in rows if row[sort] is None]
    known.sort(key=lambda row: row[sort], reverse=sort != "layer")
    for row in (*known, *unknown)[:count]:
        values = (row[name] for name in LAYER_SORTS[1:])
        table.add_row(escape(row["layer"]), *map(_short, values))
    return table


def _ranks(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    names = ("rank", "host", "up", "phase", "step", "lag", "compute_seconds", "loss")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        style = "" if row["up"] else "yellow"
        table.add_row(*(escape(_short(row[name])) for name in names), style=style)
    return table


def _short(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
