"""`mp-agent rules`: the Prometheus rule file, with this site's numbers."""

import difflib
import shlex
from pathlib import Path

import click

from mp_agent.alerting.condition import RUNBOOK_BASE
from mp_agent.alerting.durations import DURATIONS
from mp_agent.alerting.rules import render_rules, rules_heading
from mp_agent.alerting.values import Values, parse_assignments, values_in_force
from mp_agent.catalog.thresholds import THRESHOLDS
from mp_agent.errors import SettingError
from mp_agent.settings import load_settings

_NAMES = ", ".join(known.name for known in (*THRESHOLDS, *DURATIONS))


@click.command(
    "rules",
    epilog="Thresholds of the setting `thresholds` apply here as well, before --set. Give those "
    "that the node agent counts against (grad_norm_high, grad_norm_extreme, loss_scale_floor) to "
    f"the jobs too. Names that --set knows: {_NAMES}.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=Path("-"),
    help="File to write; standard output if not given.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change a threshold (a number) or a duration (seconds, or 90s, 1m30s); repeatable.",
)
@click.option(
    "--time-scale",
    type=float,
    default=1.0,
    show_default=True,
    help="Multiply every window, `for` and `keep_firing_for`, those of --set too. Makes short "
    "runs fire: 0.0167 turns minutes into seconds. Keep the shortest window (see --set: "
    "alive_window) above two scrape intervals.",
)
@click.option(
    "--runbook-base",
    default=RUNBOOK_BASE,
    show_default=True,
    help="Address below which the runbooks are published.",
)
@click.option("--check", is_flag=True, help="Write nothing; fail if --output is out of date.")
def rules_command(
    output: Path, assignments: tuple[str, ...], time_scale: float, runbook_base: str, check: bool
) -> None:
    """Write the Prometheus alerting rules."""
    values = _values(assignments, time_scale)
    heading = _heading(assignments, time_scale, runbook_base)
    text = render_rules(values, heading=heading, runbook_base=runbook_base)
    if check:
        _check(output, text)
    elif output == Path("-"):
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")


def _values(assignments: tuple[str, ...], time_scale: float) -> Values:
    try:
        thresholds, durations = parse_assignments(assignments)
        settings, _ = load_settings()
        return values_in_force(
            {**settings.thresholds, **thresholds}, durations, time_scale=time_scale
        )
    except SettingError as error:
        raise click.UsageError(str(error)) from error


def _heading(assignments: tuple[str, ...], time_scale: float, runbook_base: str) -> str:
    words = ["mp-agent", "rules"]
    for assignment in assignments:
        words += ["--set", assignment]
    if time_scale != 1.0:
        words += ["--time-scale", f"{time_scale:g}"]
    if runbook_base != RUNBOOK_BASE:
        words += ["--runbook-base", runbook_base]
    return rules_heading(shlex.join(words))


def _check(output: Path, text: str) -> None:
    """Exit with 1 and the difference when the file does not hold `text`."""
    if output == Path("-"):
        raise click.UsageError("--check needs --output")
    present = output.read_text(encoding="utf-8") if output.is_file() else ""
    if present == text:
        return
    lines = difflib.unified_diff(
        present.splitlines(), text.splitlines(), str(output), "as rendered now", lineterm=""
    )
    click.echo("\n".join(lines))
    raise SystemExit(1)
