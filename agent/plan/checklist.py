"""`mp-agent checklist`: nine points before a run, by check and by a short run of the script.

Each point is judged by rules of `mp-agent check`, by conditions that held in the short run, and by
what was measured in it; what none of these has looked at is said to be so.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import click

from mp_agent.errors import SettingError
from mp_agent.flight.postmortem.diagnosis import ALERTING
from mp_agent.inputs.files import read_text
from mp_agent.lint.script import check_script, imported_files
from mp_agent.output import Console, refuse
from mp_agent.plan.checklist_points import POINTS, ChecklistPoint, Looked
from mp_agent.plan.short_run import ShortRun, run_shortly
from mp_agent.plan.target import CRASHED
from mp_agent.report import terminal
from mp_agent.report.content import Cell, Table, plain, written
from mp_agent.report.options import count_option, json_option
from mp_agent.version import require_torch

_STEPS = 100
_SECONDS = 600
_SOURCE_BYTES_MAX = 8 << 20


class PointVerdict(Enum):
    """What is known of a point."""

    FINE = "fine"
    WRONG = "wrong"
    NOT_LOOKED_AT = "not looked at"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPoint:
    """One point of the list, with what it was judged by."""

    number: int
    title: str
    verdict: PointVerdict
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    """What to do about it, or how to have it looked at; none where it is fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklist:
    """The nine points in their order."""

    script: str
    files: int
    """Files of the script's project that check has read."""
    steps: int
    """Optimizer steps of the short run that were seen; 0 without one."""
    points: tuple[CheckedPoint, ...]
    notes: tuple[str, ...]

    @property
    def wrong(self) -> tuple[int, ...]:
        """Return the numbers of the points that are wrong."""
        return tuple(one.number for one in self.points if one.verdict is PointVerdict.WRONG)

    def as_json(self) -> str:
        """Return the list as JSON; docs/check.md describes it."""
        head = {"format": "mp_agent checklist", "version": 1}
        return written({**head, **plain(self), "wrong": self.wrong})


def _checked(number: int, point: ChecklistPoint, looked: Looked) -> CheckedPoint:
    """Return the verdict on a point: wrong by anything, fine only by what was looked at."""
    rules = {rule.code: rule for rule in point.rules}
    findings = [one for one in looked.code.findings if one.code in rules]
    names = {condition.name for condition in point.conditions}
    held = [
        one
        for one in (looked.case.conditions if looked.case else ())
        if one.name in names and one.severity in ALERTING
    ]
    seen = list(point.look(looked))
    faults = [
        *(f"{one.path}:{one.span.line}: {one.code} {one.message}" for one in findings),
        *(f"run: {one.name} since step {one.since_step}: {one.description}" for one in held),
        *(one.text for one in seen if one.wrong),
    ]
    if faults:
        remedies = [rules[one.code].remedy for one in findings] + [one.remedy for one in held]
        remedies += [point.remedy for one in seen if one.wrong]
        # What check says where it finds nothing is not to be read together with what it has found.
        more = [one.text for one in seen if not one.wrong and one.text.startswith("run:")]
        verdict, evidence, advice = PointVerdict.WRONG, [*faults, *more], remedies
    elif seen:
        verdict, evidence, advice = PointVerdict.FINE, [one.text for one in seen], []
    else:
        verdict, evidence, advice = PointVerdict.NOT_LOOKED_AT, [], [point.unseen]
    return CheckedPoint(
        number=number,
        title=point.title,
        verdict=verdict,
        evidence=tuple(dict.fromkeys(evidence)),
        advice=tuple(dict.fromkeys(filter(None, advice))),
    )


def _others(looked: Looked) -> Iterator[str]:
    """Yield what check and the run show besides, on no point of the list."""
    rules = {rule.code for point in POINTS for rule in point.rules}
    names = {condition.name for point in POINTS for condition in point.conditions}
    if others := sorted(set(looked.code.counts()) - rules):
        yield f"check finds {', '.join(others)} as well: `mp-agent check` shows where"
    if looked.case is not None:
        for one in looked.case.conditions:
            if one.name not in names and one.severity in ALERTING:
                yield f"run: {one.name} since step {one.since_step}: {one.description}"
    for skipped in looked.code.skipped:
        yield f"{skipped.path}: not checked: {skipped.reason}"


def go_through(
    script: Path, arguments: Sequence[str] = (), *, run: bool = True, steps: int, seconds: int
) -> tuple[Checklist, int]:
    """Return the list, and the exit status of the short run."""
    code = check_script(str(script))
    words = frozenset(
        word
        for file in imported_files(str(script.absolute()), code.files)
        for word in _words_of(Path(file))
    )
    short = ShortRun(None, (), "the script was not run", 0)
    if run:
        short = run_shortly(script, arguments, steps, seconds)
    looked = Looked(code, words, short.case, short.tables)
    made = Checklist(
        script=str(script),
        files=looked.files,
        steps=len(short.case.steps) if short.case else 0,
        points=tuple(_checked(place, point, looked) for place, point in enumerate(POINTS, 1)),
        notes=(*_of_run(short, steps), *_others(looked)),
    )
    return made, short.status


def _of_run(short: ShortRun, steps: int) -> Iterator[str]:
    if short.case is None:
        yield short.problem
    elif (made := len(short.case.steps)) < steps:
        yield f"the points are judged by {made} steps: the script made no more"
    if short.status:
        yield f"the script ended with status {short.status}"


def _words_of(path: Path) -> Iterator[str]:
    with suppress(OSError, ValueError):
        yield from re.findall(r"\w+", read_text(path, _SOURCE_BYTES_MAX))


_TONES = {PointVerdict.FINE: "good", PointVerdict.WRONG: "bad", PointVerdict.NOT_LOOKED_AT: "warn"}


def _print(made: Checklist, console: Console) -> None:
    counts = {verdict: 0 for verdict in PointVerdict}
    for point in made.points:
        counts[point.verdict] += 1
    text = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    good = counts[PointVerdict.FINE] == len(made.points)
    console.print(terminal.verdict(f"{made.script}: {text}.", good=good))
    rows = [
        (
            str(point.number),
            Cell(point.verdict.value, _TONES[point.verdict]),
            "\n".join((point.title, *point.evidence, *(f"→ {one}" for one in point.advice))),
        )
        for point in made.points
    ]
    console.print(terminal.table(Table(("", "", ""), rows, text=(1, 2))))
    terminal.print_notes(console, made.notes)


@click.command("checklist", context_settings={"allow_interspersed_args": False})
@count_option("--steps", _STEPS, "Optimizer steps after which the short run is ended.")
@count_option("--seconds", _SECONDS, "Seconds after which it is ended in any case.")
@click.option("--no-run", is_flag=True, help="Do not run the script: only check reads it.")
@json_option("list")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARG]…")
def checklist_command(
    script: Path,
    arguments: tuple[str, ...],
    steps: int,
    seconds: int,
    no_run: bool,
    as_document: bool,
) -> None:
    """Go through nine points before a run, and say which are fine, wrong, or not looked at.

    `mp-agent check` reads SCRIPT and what it imports of its project; then SCRIPT is run with its
    arguments for some steps, and measured. It does what it always does, such as writing
    checkpoints, and its output goes to standard error. Exit status: 0 nothing is wrong, 1 a point
    is wrong, 2 wrong use, 3 the script itself failed.
    """
    if not script.is_file():
        refuse("checklist", f"{script}: not a regular file")  # Python would wait for a pipe's
    if not no_run:
        require_torch()
    try:
        made, status = go_through(script, arguments, run=not no_run, steps=steps, seconds=seconds)
    except SettingError as error:
        refuse("checklist", error)
    if as_document:
        click.echo(made.as_json())
    else:
        _print(made, Console(highlight=False))
    sys.exit(CRASHED if status else 1 if made.wrong else 0)
