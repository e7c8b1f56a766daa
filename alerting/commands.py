"""`mp-agent rules` and `mp-agent explain`: the rule file, and a runbook in the terminal.

Values that would hide what is wrong are refused.
"""

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
from rich import box
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.durations import (
    DURATIONS,
    SCRAPE_GAP,
    Duration,
    parse_seconds,
    prometheus_duration,
)
from mp_agent.alerting.expressions import Count, Gone, Series, Silent, Unreachable, walk
from mp_agent.alerting.links import ALERT_MARK
from mp_agent.alerting.pages import PREFIX, condition_named, runbook_text
from mp_agent.alerting.rules import render_rules, rules_heading
from mp_agent.alerting.site import OFF, site_values, usable_values
from mp_agent.alerting.values import SELECTORS, Values, number_text
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import THRESHOLDS
from mp_agent.errors import SettingError, unknown_name
from mp_agent.output import Console, OutputPath, refuse, write_whole
from mp_agent.settings import load_settings

SHORTEST_SECONDS = 1.0
"""No window is shorter: Prometheus itself scrapes no more often in earnest."""


def windows() -> Mapping[Duration, tuple[str, ...]]:
    """Return the durations over which samples are looked at, with the alerts that do."""
    found: dict[Duration, dict[str, None]] = {SCRAPE_GAP: {}}
    for condition in CONDITIONS:
        for node in (node for level in condition.levels for node in walk(level.when)):
            match node:
                case Count(window=window) | Series(over=(_, window)):
                    found.setdefault(window, {})[condition.name] = None
                case Gone(window=window) | Silent(window=window) | Unreachable(window=window):
                    found.setdefault(window, {})[condition.name] = None
    return {window: tuple(names) for window, names in found.items()}


def check_windows(values: Values) -> None:
    """Refuse values with which a window holds no two samples, however often is scraped."""
    for window in windows():
        seconds = values.seconds[window.name]
        if seconds < SHORTEST_SECONDS:
            scaled = "" if values.time_scale == 1 else f" with the time scale {values.time_scale:g}"
            raise SettingError(
                f"{window.name} is {seconds:g} s{scaled}: a window shorter than "
                f"{SHORTEST_SECONDS:g} s holds no two scrapes, and {_alerts(window)} would see "
                "nothing"
            )


def blind_spots(values: Values, scrape_seconds: float) -> list[str]:
    """Return, in whole sentences, what rules with these values miss at a scrape interval."""
    short = [window for window in windows() if values.seconds[window.name] < 2 * scrape_seconds]
    return [
        f"{window.name} is {prometheus_duration(values.seconds[window.name])}, less than two "
        f"scrapes of {prometheus_duration(scrape_seconds)}: {_consequence(window)}"
        for window in sorted(short, key=DURATIONS.index)
    ]


def _consequence(window: Duration) -> str:
    if window is SCRAPE_GAP:
        return "every alert loses its hold with each scrape that fails, and may never fire."
    return f"{_alerts(window)} may see one sample or none, and never fire."


def _alerts(window: Duration) -> str:
    return ", ".join(windows()[window]) or "every alert"


_ADDRESS = re.compile(r"https?://[^\s{}<>\"]+")
_COUNTED_AGAINST = dict.fromkeys(name for metric in METRICS for name in metric.thresholds)


def _seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    try:
        seconds = parse_seconds("--scrape-interval", text)
    except SettingError as error:
        raise click.BadParameter(str(error), context, option) from error
    if not seconds:
        raise click.BadParameter("it must be above 0", context, option)
    return seconds


@click.command(
    "rules",
    epilog="The settings `thresholds` and `alerts` apply here as well, before --set. Give the "
    "thresholds that the node agent counts against to the jobs too: "
    f"{', '.join(_COUNTED_AGAINST)}. `mp-agent rules --list` shows what --set can change.",
)
@click.option(
    "--output",
    type=OutputPath(allow_dash=True),
    default=Path("-"),
    help="File to write; standard output if not given.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change a threshold (a number), a duration (seconds, or 90s, 1m30s), a severity "
    "(MpAgentLossSpike.severity=info, MpAgentGradientExplosion.info=off, MpAgentLossSpike=off) or "
    'a selector (selectors.series=cluster="a"); repeatable.',
)
@click.option(
    "--time-scale",
    type=float,
    default=1.0,
    show_default=True,
    help="Multiply every window, `for` and `keep_firing_for`, those of --set too. Makes short "
    "runs fire: 0.0167 turns minutes into seconds. Every window has to be longer than two scrape "
    "intervals.",
)
@click.option(
    "--scrape-interval",
    "scrape_seconds",
    default="15s",
    show_default=True,
    callback=_seconds,
    help="How often your Prometheus scrapes the node agents. Changes no rule: windows that are too "
    "short for it are reported.",
)
@click.option(
    "--runbook-base",
    default="",
    help="Address below which the runbooks lie as files, such as their folder in a repository; "
    f"or, with {ALERT_MARK} for an alert's name in lower case, that of any page. Without it the "
    "alerts have no link to a runbook.",
)
@click.option(
    "--dashboard-base",
    default="",
    help="Address of Grafana. Without it the alerts have no link to a dashboard.",
)
@click.option(
    "--list",
    "lists",
    is_flag=True,
    help="Write no rules; list what --set can change, with the values in force.",
)
@click.option("--check", is_flag=True, help="Write nothing; fail if --output is out of date.")
def rules_command(
    output: Path,
    assignments: tuple[str, ...],
    time_scale: float,
    scrape_seconds: float,
    runbook_base: str,
    dashboard_base: str,
    lists: bool,
    check: bool,
) -> None:
    """Write the Prometheus alerting rules."""
    _check_address("runbook-base", runbook_base, mark=ALERT_MARK)
    _check_address("dashboard-base", dashboard_base)
    values = _values(assignments, time_scale)
    if lists:
        Console().print(*tables_of(values), sep="\n")
        return
    heading = _heading(assignments, time_scale, runbook_base, dashboard_base)
    _note_missing_links(runbook_base, dashboard_base)
    for warning in blind_spots(values, scrape_seconds):
        click.echo(f"warning: {warning}", err=True)
    text = render_rules(
        values, heading=heading, runbook_base=runbook_base, dashboard_base=dashboard_base
    )
    if check:
        _check(output, text)
    elif output == Path("-"):
        click.echo(text, nl=False)
    else:
        write_whole(output, text)


def tables_of(values: Values) -> Iterator[Table]:
    """Yield the thresholds, durations, alerts and selectors that can be set, as tables."""
    yield _table(
        ("threshold", "value", "default", "unit", "meaning"),
        (
            (
                one.name,
                number_text(values.limit(one)),
                number_text(one.value),
                one.unit,
                one.meaning,
            )
            for one in THRESHOLDS
        ),
    )
    yield _table(
        ("duration", "value", "default", "meaning"),
        (
            (one.name, values.duration(one), prometheus_duration(one.seconds), one.meaning)
            for one in DURATIONS
        ),
    )
    yield _table(
        ("alert", "severity", "default"),
        (
            (
                f"{condition.name}.{severity.value}",
                changed.value if changed else OFF,
                severity.value,
            )
            for condition in CONDITIONS
            for severity in (level.severity for level in condition.levels)
            for changed in [values.severity(condition.name, severity)]
        ),
    )
    yield _table(
        ("selector", "value", "default"),
        ((f"selectors.{name}", values.selectors[name], own) for name, own in SELECTORS.items()),
    )


def _table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name in (names[0], "value", "default"))
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _note_missing_links(runbook_base: str, dashboard_base: str) -> None:
    if not runbook_base:
        text = "note: without --runbook-base alerts link to the runbooks that node agents serve"
        click.echo(text, err=True)
    if not dashboard_base:
        click.echo("note: without --dashboard-base the alerts have no dashboard_url", err=True)


def _check_address(name: str, address: str, *, mark: str = "") -> None:
    """Refuse what is no address, but for `mark`: Prometheus would fail on it as a template."""
    if address and not _ADDRESS.fullmatch(address.replace(mark, "") if mark else address):
        raise click.UsageError(f"--{name} has value {address!r}; it must be an http(s) address")


def _values(assignments: tuple[str, ...], time_scale: float) -> Values:
    try:
        settings, _ = load_settings(refuse=("thresholds", "alerts"))
        values = site_values(settings, assignments, time_scale=time_scale)
        check_windows(values)
        return values
    except SettingError as error:
        raise click.UsageError(str(error)) from error


def _heading(
    assignments: tuple[str, ...], time_scale: float, runbook_base: str, dashboard_base: str
) -> str:
    words = ["mp-agent", "rules"]
    for assignment in assignments:
        words += ["--set", assignment]
    if time_scale != 1.0:
        words += ["--time-scale", f"{time_scale:g}"]
    if runbook_base:
        words += ["--runbook-base", runbook_base]
    if dashboard_base:
        words += ["--dashboard-base", dashboard_base]
    return rules_heading(shlex.join(words))


def _check(output: Path, text: str) -> None:
    """Exit with 1 and the difference when the file does not hold `text`."""
    if output == Path("-"):
        raise click.UsageError("--check needs --output")
    present = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    if present == text:
        return
    lines = difflib.unified_diff(
        present.splitlines(), text.splitlines(), str(output), "as rendered now", lineterm=""
    )
    click.echo("\n".join(lines))
    raise SystemExit(1)


_FOLDED = re.compile(r"<details><summary>(.*?)</summary>(.*?)</details>", re.DOTALL)


@click.command("explain")
@click.argument("alert")
def explain_command(alert: str) -> None:
    """Explain an alert: how bad it is, how to confirm it, likely causes, what to do.

    ALERT is its name, in any case, with or without MpAgent: `mp-agent explain LossSpike`. The
    numbers are those that the settings have in force here.
    """
    condition = condition_named(alert)
    if condition is None:
        short = "" if alert.startswith(PREFIX) else PREFIX
        known = (condition.name.removeprefix(short) for condition in CONDITIONS)
        refuse("explain", unknown_name(alert, known))
    settings, _ = load_settings()
    values = usable_values(settings, time_scale=settings.time_scale)[0]
    text = _FOLDED.sub(r"### \1\n\2", runbook_text(condition, values))
    Console().print(Markdown(text))
