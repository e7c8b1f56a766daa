"""Reads and judges many logs, on several processors."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from mp_agent.alerting.values import Values
from mp_agent.backtest.judge import play
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.readers.find import Source, read_logs, renamed
from mp_agent.backtest.results import Failure, RunResult
from mp_agent.errors import LogError, NothingToJudge
from mp_agent.inputs.addresses import shown_address

_BYTES_PER_PROCESS = 300_000
"""Of logs; below that, starting a process takes longer than judging."""


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


def split(judged: Sequence[Judged]) -> tuple[list[tuple[RunResult, ...]], tuple[Failure, ...]]:
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
