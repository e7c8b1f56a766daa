"""`mp-agent tune`: thresholds by which healthy runs stay quiet."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from mp_agent.alerting.values import Values
from mp_agent.backtest.options import log_options, past_runs, values_of
from mp_agent.backtest.past_runs import HEALTHY, WRONG
from mp_agent.backtest.readers.find import Source
from mp_agent.backtest.report import print_failures
from mp_agent.backtest.results import RunResult
from mp_agent.backtest.tuning import (
    Search,
    ThresholdChange,
    Tuning,
    alarms_of,
    chart_values_text,
    settings_text,
    values_with,
)
from mp_agent.inputs.addresses import shown_address
from mp_agent.output import Console, refuse, write_whole
from mp_agent.report import terminal
from mp_agent.report.content import Table
from mp_agent.report.options import FiniteRange, count_option, file_option, wide_console

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
@count_option("--false-alarms", 0, "Alarms of healthy runs that may remain, in all.", least=0)
@click.option(
    "--severity",
    type=click.Choice(("critical", "warning", "info")),
    default="warning",
    show_default=True,
    help="Mildest severity of an alert that is an alarm.",
)
@click.option(
    "--margin",
    type=FiniteRange(min=1.0, max=100.0),
    default=1.25,
    show_default=True,
    help="Factor by which thresholds are moved beyond where the alarms stop.",
)
@file_option("--output", help="Write the proposal as a settings file.")
@file_option("--chart-values", help="Write the proposal as values of the chart.")
def tune_command(
    logs: tuple[str, ...],
    assignments: tuple[str, ...],
    false_alarms: int,
    severity: str,
    margin: float,
    output: Path | None,
    chart_values: Path | None,
    **reading: Any,
) -> None:
    """Propose thresholds by which healthy runs bring no alarms.

    LOG is as for `mp-agent backtest`. Without --labels all runs count as healthy. Runs that are
    labelled wrong are judged before and after: the proposal says how many of them it still finds.
    """
    values = values_of(assignments)
    past = past_runs("tune", logs, (values,), outputs=(output, chart_values), **reading)
    # A run names its source without the credentials of the address.
    by_source = {shown_address(source.address): source for source in past.sources}

    def judge(
        chosen: Sequence[str], settings: Sequence[Values], conditions: frozenset[str] | None
    ) -> list[Sequence[RunResult]]:
        wanted = replace(past.job, values=tuple(settings), alerts=conditions)
        return list(past.judge(wanted, [by_source.get(one, Source(one)) for one in chosen])[0])

    runs, failures = past.judge()
    print_failures(failures, Console(stderr=True, soft_wrap=True))
    labelled = [run[0] for run in runs]
    healthy = [run for run in labelled if not past.labels or run.label == HEALTHY]
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


def _cells(change: ThresholdChange) -> tuple[str, ...]:
    return (
        change.name,
        change.before,
        change.proposed,
        "-" if change.limit is None else f"{change.limit:g}",
        "-" if change.margin is None else f"{change.margin:.3g}",
        f"{change.condition} of {', '.join(change.runs)}",
    )


def _print(tuning: Tuning, severity: str) -> None:
    console = wide_console()
    if tuning.changes:
        headings = ("setting", "now", "proposed", "alarms stop at", "margin", "because of")
        table = Table(headings, list(map(_cells, tuning.changes)), text=range(len(headings)))
        console.print(terminal.table(table))
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
