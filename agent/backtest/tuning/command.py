"""`mp-agent tune`: thresholds by which healthy runs stay quiet."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from mp_agent.alerting.values import Values
from mp_agent.backtest.options import (
    HEALTHY,
    WRONG,
    Job,
    judge_with_bar,
    label_of,
    log_options,
    read_labels,
    read_options,
    split,
    values_of,
)
from mp_agent.backtest.readers.find import Source, expand
from mp_agent.backtest.report import print_failures
from mp_agent.backtest.results import RunResult
from mp_agent.backtest.tuning.knobs import values_with
from mp_agent.backtest.tuning.search import (
    Search,
    Tuning,
    alarms_of,
    chart_values_text,
    settings_text,
)
from mp_agent.errors import LogError
from mp_agent.inputs.addresses import shown_address
from mp_agent.output import Console, refuse, write_whole

_TOO_MANY = 1


@click.command(
    "tune",
    epilog="Give the settings file to node agents and to the commands as MP_AGENT_CONFIG, and the "
    "values file to helm by --values. Exit status: 0 healthy runs bring no more alarms than "
    "allowed, 1 they still bring more, 2 wrong use or no healthy run.",
)
@log_options
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="What to start from, as for `mp-agent rules`; repeatable.",
)
@click.option(
    "--false-alarms",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Alarms of healthy runs that may remain, in all.",
)
@click.option(
    "--severity",
    type=click.Choice(("critical", "warning", "info")),
    default="warning",
    show_default=True,
    help="Mildest severity of an alert that is an alarm.",
)
@click.option(
    "--margin",
    type=click.FloatRange(min=1.0, max=100.0),
    default=1.25,
    show_default=True,
    help="Factor by which thresholds are moved beyond where the alarms stop.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the proposal as a settings file.",
)
@click.option(
    "--chart-values",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the proposal as values of the chart.",
)
def tune_command(
    logs: tuple[str, ...],
    assignments: tuple[str, ...],
    false_alarms: int,
    severity: str,
    margin: float,
    output: Path | None,
    chart_values: Path | None,
    step_seconds: float | None,
    labels_path: Path | None,
    processes: int | None,
    **reading: Any,
) -> None:
    """Propose thresholds by which healthy runs bring no alarms.

    LOG is as for `mp-agent backtest`. Without --labels all runs count as healthy. Runs that are
    labelled wrong are judged before and after: the proposal says how many of them it still finds.
    """
    reading["log_format"] = reading["log_format"] or ""
    values = values_of(assignments)
    try:
        labels = read_labels(labels_path) if labels_path else {}
        sources = list(expand(logs))
    except (LogError, OSError) as error:
        refuse("tune", str(error))
    job = Job(options=read_options(**reading), values=(values,), step_seconds=step_seconds)

    # A run names its source without the credentials of the address.
    by_source = {shown_address(source.address): source for source in sources}

    def judge(
        chosen: Sequence[str], settings: Sequence[Values], conditions: frozenset[str] | None
    ) -> list[Sequence[RunResult]]:
        wanted = replace(job, values=tuple(settings), alerts=conditions)
        judged = judge_with_bar(
            [by_source.get(one, Source(one)) for one in chosen],
            wanted,
            processes=processes,
            what="judging",
        )
        return list(split(judged)[0])

    judged = judge_with_bar(sources, job, processes=processes, what="judging")
    runs, failures = split(judged)
    print_failures(failures, Console(stderr=True, soft_wrap=True))
    labelled = [replace(run[0], label=label_of(labels, run[0])) for run in runs]
    healthy = [run for run in labelled if not labels or run.label == HEALTHY]
    wrong = [run for run in labelled if run.label == WRONG]
    if not healthy:
        refuse("tune", "no run is healthy; see --labels")
    search = Search(values=values, judge=judge, severity=severity, margin=margin)
    tuning = _tune(search, healthy, wrong, false_alarms)
    _print(tuning, severity)
    heading = ("Written by " + shlex.join(("mp-agent", "tune", *sys.argv[2:])) + ".",)
    for path, text in ((output, settings_text), (chart_values, chart_values_text)):
        if path is not None:
            write_whole(path, text(tuning.proposal, heading, tuning.changes))
            click.echo(str(path))
    sys.exit(_TOO_MANY if len(tuning.alarms_after) > false_alarms else 0)


def _tune(
    search: Search, healthy: Sequence[RunResult], wrong: Sequence[RunResult], allowed: int
) -> Tuning:
    alarms = alarms_of(healthy, search.severity)
    proposal, changes = search.propose(alarms, allowed)
    sources = list(dict.fromkeys(run.source for run in healthy))
    names = {(run.source, run.name) for run in healthy}
    wrong_sources = list(dict.fromkeys(run.source for run in wrong))
    found = {run.name for run in wrong if alarms_of([run], search.severity)}
    after, found_after = alarms, len(found)
    if proposal.thresholds or proposal.severities:
        settled = values_with(search.values, proposal)
        results = [run[0] for run in search.judge(sources, (settled,), None)]
        after = alarms_of(_same(results, names), search.severity)
        again = [run[0] for run in search.judge(wrong_sources, (settled,), None)]
        wrong_names = {(run.source, run.name) for run in wrong}
        found_after = sum(
            bool(alarms_of([run], search.severity)) for run in _same(again, wrong_names)
        )
    return Tuning(
        healthy=len(healthy),
        wrong=len(wrong),
        proposal=proposal,
        changes=changes,
        alarms_before=tuple(alarms),
        alarms_after=tuple(after),
        found_before=len(found),
        found_after=found_after,
        headroom=search.headroom(sources, proposal),
    )


def _same(runs: Sequence[RunResult], names: set[tuple[str, str]]) -> list[RunResult]:
    return [run for run in runs if (run.source, run.name) in names]


def _print(tuning: Tuning, severity: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 132))
    if tuning.changes:
        table = Table(box=None, padding=(0, 2, 0, 0))
        headings = ("setting", "now", "proposed", "alarms stop at", "margin", "because of")
        for heading in headings:
            table.add_column(heading)
        for change in tuning.changes:
            limit = "-" if change.limit is None else f"{change.limit:g}"
            margin = "-" if change.margin is None else f"{change.margin:.3g}"
            runs = ", ".join(change.runs)
            cells = (change.name, change.before, change.proposed, limit, margin)
            table.add_row(*map(Text, (*cells, f"{change.condition} of {runs}")))
        console.print(table)
    else:
        console.print(Text("Nothing has to change."))
    for name, factor in tuning.headroom.items():
        text = (
            f"no alarm with thresholds {factor:g} times as strict"
            if factor > 1
            else "alarms with thresholds 1.25 times as strict"
        )
        console.print(Text(f"  {name}: {text}", style="dim"))
    console.print(
        Text(
            f"{tuning.healthy} healthy runs: {len(tuning.alarms_before)} alarms ({severity} or "
            f"worse) now, {len(tuning.alarms_after)} with the proposal",
            style="bold",
        )
    )
    if tuning.wrong:
        console.print(
            Text(
                f"{tuning.wrong} wrong runs: {tuning.found_before} found now, "
                f"{tuning.found_after} with the proposal",
                style="bold",
            )
        )
