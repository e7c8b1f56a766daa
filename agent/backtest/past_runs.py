"""Many logs judged at once, and which of their runs are called healthy or wrong."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.progress import Progress

from mp_agent.alerting.values import Values
from mp_agent.backtest.judge import play
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.readers.find import Source, read_logs, renamed
from mp_agent.backtest.results import Failure, RunResult
from mp_agent.errors import LogError, NothingToJudge, SourceError
from mp_agent.inputs.addresses import shown_address
from mp_agent.inputs.files import parse_yaml_texts, read_text
from mp_agent.output import Console

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
    # A fork would copy threads' locks; spawned processes import what they need.
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        for result in pool.map(judge, sources, chunksize=1):
            results.append(result)
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
