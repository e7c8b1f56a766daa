"""`mp-agent dashboards`: the Grafana dashboards of this version, with this site's limits."""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import click

from mp_agent.catalog.thresholds import DEFAULTS, resolve
from mp_agent.errors import SettingError
from mp_agent.output import OutputPath, UnwritableError, write_whole
from mp_agent.settings import load_settings

_ADDRESS = re.compile(r"https?://[^\s{}<>\"\\]+")
_RUNBOOK = re.compile(r"@runbook_base@/([a-z0-9]+)\.md")


def dashboards(
    thresholds: Mapping[str, float] = DEFAULTS, runbook_base: str | None = None
) -> Mapping[str, str]:
    """Return the dashboards' JSON by file name, with these thresholds in panels and texts.

    runbook_base: address below which the runbooks lie as files, or one with `{alert}` for an
    alert's name in lower case; a placeholder by default.
    """
    package = files("mp_agent")
    marks = json.loads((package / "exporters" / "dashboard_marks.json").read_text("utf-8"))
    base = runbook_base or marks["runbook_base"]
    found = {}
    for name, marked_lines in sorted(marks["lines"].items()):
        lines = (package / "dashboards" / name).read_text("utf-8").splitlines(keepends=True)
        for number, line in marked_lines.items():
            lines[int(number)] = with_values(line, thresholds, base) + "\n"
        found[name] = "".join(lines)
    return found


def with_values(marked: str, thresholds: Mapping[str, float], runbook_base: str) -> str:
    """Return JSON with values in place of its marks; one that is a whole string becomes a number.

    Marks are `@name@` of a threshold, and `@runbook_base@`, which a runbook's file follows.
    """
    page = runbook_base if "{alert}" in runbook_base else f"{runbook_base.rstrip('/')}/{{alert}}.md"
    for name, value in thresholds.items():
        number = f"{value:.15g}"
        marked = marked.replace(f'"@{name}@"', number).replace(f"@{name}@", number)
    return _RUNBOOK.sub(lambda found: page.replace("{alert}", found[1]), marked)


@click.command(
    "dashboards",
    epilog="The setting `thresholds` applies here as well, before --set. "
    f"Thresholds: {', '.join(DEFAULTS)}.",
)
@click.option(
    "--output",
    type=OutputPath(directory=True),
    help="Directory to write into; without it the dashboards are listed.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Draw another threshold, as `mp-agent rules --set` alerts on it; repeatable.",
)
@click.option(
    "--runbook-base",
    help="Address below which the runbooks lie as files, such as their folder in a repository; "
    "or, with {alert} for an alert's name in lower case, that of any page.",
)
def dashboards_command(
    output: Path | None, assignments: tuple[str, ...], runbook_base: str | None
) -> None:
    """Write the Grafana dashboards, to import or to provision."""
    if runbook_base is not None and not _ADDRESS.fullmatch(runbook_base.replace("{alert}", "")):
        raise click.UsageError(
            f"--runbook-base has value {runbook_base!r}; it must be an http(s) address"
        )
    try:
        settings, _ = load_settings()
        thresholds = resolve({**settings.thresholds, **dict(map(_assignment, assignments))})
    except SettingError as error:
        raise click.UsageError(str(error)) from error
    found = dashboards(thresholds, runbook_base)
    if output is None:
        for name, text in found.items():
            click.echo(f"{name}: {json.loads(text)['title']}")
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableError(f"{error.filename} cannot be made: {error.strerror}") from error
    for name, text in found.items():
        write_whole(output / name, text)
    click.echo(f"{len(found)} dashboards in {output}")


def _assignment(text: str) -> tuple[str, float]:
    """Return the threshold that `NAME=VALUE` sets; SettingError when it sets none."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise SettingError(f"{text!r} sets nothing; write NAME=VALUE")
    try:
        return name, float(value)
    except ValueError:
        raise SettingError(f"thresholds: {name} has value {value!r}; it must be a number") from None
