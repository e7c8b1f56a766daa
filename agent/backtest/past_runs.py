"""Past runs judged by their logs: by which conditions, one log or many, and which are healthy."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path

from rich.progress import Progress

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import Values
from mp_agent.backtest.log.steps import course_of, update_skipped
from mp_agent.backtest.log.training_log import Point, ReadOptions, TrainingLog
from mp_agent.backtest.readers.find import Source, read_logs, renamed
from mp_agent.backtest.results import Blind, Failure, RunCurves, RunResult
from mp_agent.errors import LogError, NothingToJudge, SourceError
from mp_agent.inputs.addresses import shown_address
from mp_agent.inputs.files import parse_yaml_texts, read_text
from mp_agent.inputs.workers import worker_processes
from mp_agent.node.accounting.gradients import FIRST_STEPS
from mp_agent.node.accounting.loss import WARM_UP_STEPS
from mp_agent.node.flight.judge import RunJudge
from mp_agent.output import Console
from mp_agent.records.conditions import Alert

_BASELINES: Mapping[Quantity, tuple[str, int, str]] = {
    Quantity.LOSS: ("loss", WARM_UP_STEPS, "losses"),
    Quantity.GRAD_NORM: ("grad_norm", FIRST_STEPS, "gradient norms"),
}
"""Quantity → field of a point, and of how many of them its usual level needs more."""


def blind_spots(log: TrainingLog) -> Iterator[Blind]:
    """Yield the conditions that a log cannot show, in the catalog's order, with the reason.

    What Prometheus scraped was judged by all steps, however few scrapes there are.
    """
    held = log.held
    for condition in CONDITIONS:
        lacking = min((set(needed) - held for needed in condition.needs), key=len)
        if lacking:
            names = " and ".join(sorted(quantity.value for quantity in lacking))
            yield Blind(condition.name, f"the log does not hold {names}")
        elif condition.usual is not None and not log.scrapes:
            quantity, needed_points, plural = _BASELINES[condition.usual]
            points = sum(getattr(point, quantity) is not None for point in log.points)
            if points <= needed_points:
                yield Blind(
                    condition.name,
                    f"the log holds {points} {plural}; a usual level needs more than "
                    f"{needed_points}",
                )


_SOUGHT = (Quantity.LOSS, Quantity.GRAD_NORM, Quantity.LOSS_SCALE)
"""What a training log usually holds; the loss scale only with FP16."""


def play(
    log: TrainingLog,
    values: Values,
    *,
    step_seconds: float | None = None,
    only: frozenset[str] | None = None,
) -> RunResult:
    """Return what the conditions make of a log.

    step_seconds: time per step, if it is given. only: names of the conditions to judge; None: all.
    """
    course = course_of(log, step_seconds)
    blind = tuple(blind_spots(log))
    idle = {spot.name for spot in blind}
    conditions = [
        condition
        for condition in CONDITIONS
        if condition.name not in idle and (only is None or condition.name in only)
    ]
    judge = RunJudge(log.name, values, conditions, merged=bool(log.merged))
    if log.scrapes:
        pairs = zip(log.scrapes, log.points, strict=False)
        judge.play_series((s.time_seconds, point.step, s.readings) for s, point in pairs)
    else:
        judge.play(course.steps())
    times = course.pace.times
    return RunResult(
        name=log.name,
        source=log.source,
        format=log.format,
        points=len(log.points),
        first_step=log.points[0].step,
        last_step=log.points[-1].step,
        seconds=times[-1] - times[0],
        step_seconds=course.pace.step_seconds,
        pace_origin=course.pace.origin,
        alerts=judge.episodes.alerts(),
        highest=dict(_highest(judge.episodes.alerts(), log.points)),
        blind=blind,
        not_found=tuple(quantity.value for quantity in _SOUGHT if quantity not in log.held),
        notes=(*log.notes, *course.notes),
        curves=curves_of(log.points),
    )


def _highest(
    alerts: Iterable[Alert], points: Sequence[Point]
) -> Iterator[tuple[str, tuple[float, int]]]:
    """Yield the highest loss or norm, and its step, of alerts on how many are above the usual."""
    usual = {condition.name: condition.usual for condition in CONDITIONS}
    for alert in alerts:
        quantity = usual[alert.name]
        if quantity is None:
            continue
        logged = [
            (value, point.step)
            for point in points
            if any(first <= point.step <= last for first, last in alert.spans)
            and (value := _finite(getattr(point, _BASELINES[quantity][0]))) is not None
        ]
        if logged:
            yield alert.name, max(logged)


PLACES_MAX = 1200
"""Points of a curve at most."""
NAMES = ("loss", "grad_norm", "learning_rate", "loss_scale")


def curves_of(points: Sequence[Point]) -> RunCurves:
    """Return the curves of a log's points; of those with equal numbers everywhere, none."""
    kept = _kept(points)
    shown = [points[index] for index in kept]
    values = {}
    for name in NAMES:
        column = [_finite(getattr(point, name)) for point in shown]
        if any(value is not None for value in column):
            values[name] = column
    # Where a point with trouble was thinned out, the next one that is shown bears its mark.
    marks: dict[str, list[int]] = {"loss": [], "grad_norm": [], "skipped": []}
    place = 0
    for index, point in enumerate(points):
        while place < len(kept) - 1 and kept[place] < index:
            place += 1
        for name in ("loss", "grad_norm"):
            value = getattr(point, name)
            if value is not None and not isfinite(value):
                marks[name].append(place)
        if point.skipped_steps or update_skipped(points, index):
            marks["skipped"].append(place)
    return RunCurves(
        step=[point.step for point in shown],
        values=values,
        marks={name: sorted(set(places)) for name, places in marks.items() if places},
    )


def _kept(points: Sequence[Point]) -> list[int]:
    """Return the indices to draw: of each stretch the first, and each curve's extremes."""
    if len(points) <= PLACES_MAX:
        return list(range(len(points)))
    stretches = PLACES_MAX // (1 + 2 * 2)
    size = -(-len(points) // stretches)
    kept = {0, len(points) - 1}
    for begin in range(0, len(points), size):
        indices = range(begin, min(begin + size, len(points)))
        kept.add(begin)
        for name in NAMES[:2]:
            known = [
                (v, i) for i in indices if (v := _finite(getattr(points[i], name))) is not None
            ]
            if known:
                kept.update((min(known)[1], max(known)[1]))
    return sorted(kept)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


_BAR_LOGS_MIN = 5
_BYTES_PER_PROCESS = 300_000
"""Bytes of logs below which starting a process takes longer than judging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How each log is read and judged."""

    options: ReadOptions
    values: Sequence[Values]
    """One or several settings; each run is judged by each."""
    step_seconds: float | None = None
    alerts: frozenset[str] | None = None
    """The conditions to judge; None: all."""


Judged = Failure | tuple[tuple[RunResult, ...], ...]
"""A log that failed; or for each run of the log, its result by each of the settings."""


def judge_all(
    sources: Sequence[Source],
    job: Job,
    *,
    processes: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Judged]:
    """Return what came of each source, in order. progress: called after each."""
    wanted = processes or os.cpu_count() or 1
    paths = [source.address for source in sources]
    size = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    useful = len(sources) if size > 2 * _BYTES_PER_PROCESS else 1
    count = max(1, min(wanted, useful))
    judge = partial(judge_source, job=job)
    results: list[Judged] = []
    if count == 1:
        for source in sources:
            results.append(judge(source))
            progress()
        return results
    with worker_processes(count) as pool:
        for future in [pool.submit(judge, source) for source in sources]:
            results.append(future.result())
            progress()
    return results


def judge_source(source: Source, job: Job) -> Judged:
    """Return what came of one source; never raises for what is wrong with a log.

    Of what was not named itself, tables without anything to judge are passed over.
    """
    address = source.address
    try:
        logs = renamed(read_logs(address, job.options))
    except NothingToJudge as error:
        return () if source.found else Failure(address, str(error))
    except LogError as error:
        return Failure(shown_address(address), str(error))
    except (MemoryError, RecursionError) as error:
        shown = shown_address(address)
        return Failure(shown, f"{shown}: is too large: {type(error).__name__}")
    return tuple(
        tuple(
            play(log, values, step_seconds=job.step_seconds, only=job.alerts)
            for values in job.values
        )
        for log in logs
    )


JudgedRuns = tuple[list[tuple[RunResult, ...]], tuple[Failure, ...]]
"""For each run its result by each of the settings, and the logs that failed."""


def split(judged: Sequence[Judged]) -> JudgedRuns:
    """Return the results of all runs, with names that differ, and the logs that failed."""
    runs = [run for one in judged if not isinstance(one, Failure) for run in one]
    failures = tuple(one for one in judged if isinstance(one, Failure))
    seen: dict[str, int] = {}
    distinct = []
    for run in runs:
        name = run[0].name
        seen[name] = seen.get(name, 0) + 1
        called = name if seen[name] == 1 else f"{name} ({seen[name]})"
        distinct.append(tuple(replace(result, name=called) for result in run))
    return distinct, failures


HEALTHY, WRONG, UNCLEAR = "healthy", "wrong", "unclear"
LABELS = (HEALTHY, WRONG, UNCLEAR)
_BYTES_MAX = 4 << 20
_CHARACTERS_SHOWN = 60


def read_labels(path: Path) -> dict[str, str]:
    """Return run or path → label, of a YAML or JSON mapping, or of CSV lines `run,label`.

    Raises LogError, naming the file and the line or run.
    """
    try:
        text = read_text(path, _BYTES_MAX)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror or error}") from error
    labels = _of_csv(path, text) if path.suffix == ".csv" else _of_mapping(path, text)
    for run, label in labels.items():
        if label not in LABELS:
            shown = f"run {run[:_CHARACTERS_SHOWN]!r} has label {label[:_CHARACTERS_SHOWN]!r}"
            raise LogError(f"{path}: {shown}; it must be one of {', '.join(LABELS)}")
    if not labels:
        raise LogError(f"{path}: holds no label")
    return labels


def label_of(labels: Mapping[str, str], run: RunResult) -> str:
    """Return the label of a run: by its name, its path, or the name of its file; "" without one."""
    source = Path(run.source)
    keys = (run.name, run.source, source.name, source.stem, source.parent.name)
    return next((labels[key] for key in keys if key in labels), "")


def _of_csv(path: Path, text: str) -> dict[str, str]:
    labels = {}
    lines = csv.reader(text.replace("\0", "").splitlines())
    for number, row in enumerate(_rows(path, lines), start=1):
        if not row or (number == 1 and row[-1].strip() == "label"):
            continue
        if len(row) != 2:
            raise LogError(f"{path}: line {number} holds {len(row)} values; write run,label")
        labels[row[0].strip()] = row[1].strip()
    return labels


def _rows(path: Path, lines: Iterable[list[str]]) -> Iterator[list[str]]:
    try:
        yield from lines
    except csv.Error as error:
        raise LogError(f"{path}: is no CSV: {error}") from error


def _of_mapping(path: Path, text: str) -> dict[str, str]:
    try:
        content = parse_yaml_texts(text)
    except SourceError as error:
        raise LogError(f"{path}: {error}") from error
    if not isinstance(content, Mapping):
        raise LogError(f"{path}: must hold a mapping from runs to labels")
    for run, label in content.items():
        if not isinstance(run, str) or not isinstance(label, str):
            raise LogError(
                f"{path}: run {str(run)[:_CHARACTERS_SHOWN]!r} has no label, but a list or table"
            )
    return dict(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRuns:
    """The logs that a command names, how they are read, and which runs are healthy or wrong."""

    sources: Sequence[Source]
    job: Job
    labels: Mapping[str, str]
    processes: int | None

    def judge(self, job: Job | None = None, sources: Sequence[Source] | None = None) -> JudgedRuns:
        """Return the results of each run by each setting, with its label, and failures.

        job, sources: others than those of the command. Of many logs, a bar on standard error shows
        how many are judged.
        """
        chosen = self.sources if sources is None else sources
        console = Console(stderr=True)
        shown = len(chosen) >= _BAR_LOGS_MIN and console.is_terminal
        with Progress(console=console, transient=True, disable=not shown) as bar:
            task = bar.add_task("judging", total=len(chosen))
            judged = judge_all(
                chosen,
                job or self.job,
                processes=self.processes,
                progress=lambda: bar.advance(task),
            )
        runs, failures = split(judged)
        return [tuple(map(self._labelled, run)) for run in runs], failures

    def _labelled(self, run: RunResult) -> RunResult:
        return replace(run, label=label_of(self.labels, run))
