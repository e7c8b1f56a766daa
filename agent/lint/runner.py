"""Checks many files, in several processes, and joins what they found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from mp_agent.lint.analysis import FileResult, TentativeFinding, check_file
from mp_agent.lint.finding import CodeFinding
from mp_agent.lint.interpret.project import Project
from mp_agent.lint.results import CheckReport, SkippedFile
from mp_agent.lint.rules import BY_CODE

_FILES_PER_TASK = 100
"""Neighbours import the same modules, which are parsed once per task."""


def run(files: Sequence[str], wanted: Callable[[str, str], bool], *, jobs: int = 1) -> CheckReport:
    """Check files; `wanted(code, path)` decides which findings are reported."""
    tasks = [
        files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK)
    ]
    several = jobs > 1 and len(tasks) > 1
    results = (
        _in_processes(tasks, jobs) if several else [one for task in tasks for one in _check(task)]
    )
    shown = {os.path.abspath(path): path for path in files}
    findings = {
        finding
        for candidate in _kept(results)
        if candidate.path in shown
        for finding in [replace(candidate.finding, path=shown[candidate.path])]
        if wanted(finding.code, finding.path)
    }
    skipped = [SkippedFile(result.path, result.skipped) for result in results if result.skipped]
    errors = [error for result in results for error in result.errors.values()]
    return CheckReport(_distinct(findings), tuple(skipped), len(files), tuple(errors))


def _distinct(findings: Iterable[CodeFinding]) -> tuple[CodeFinding, ...]:
    """Return one finding per rule and place, in order."""
    distinct: dict[tuple[object, ...], CodeFinding] = {}
    for finding in sorted(findings, key=lambda one: (one.sort_key, one.message)):
        distinct.setdefault(finding.sort_key, finding)
    return tuple(distinct.values())


def _in_processes(tasks: Sequence[Sequence[str]], jobs: int) -> list[FileResult]:
    # A fork would copy the locks that the caller's threads hold.
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        return [result for results in pool.map(_check, tasks) for result in results]


def _check(files: Sequence[str]) -> list[FileResult]:
    project = Project()
    return [check_file(path, project) for path in files]


def _kept(results: Sequence[FileResult]) -> Iterable[TentativeFinding]:
    """Yield the candidates that no other file withdraws."""
    followed = {name for result in results for name in result.followed}
    sixteen_bits = _using_sixteen_bits(results)
    for result in results:
        for candidate in result.candidates:
            rule = BY_CODE[candidate.rule]
            if rule.needs_callers and candidate.function in followed:
                continue
            if rule.needs_sixteen_bits and candidate.path not in sixteen_bits:
                continue
            yield candidate


def _using_sixteen_bits(results: Sequence[FileResult]) -> set[str]:
    """Return the paths of modules that use 16 bits, and of what they import, directly or not."""
    by_name = {result.module: result for result in results if result.module}
    found: set[str] = set()
    waiting = [result for result in results if result.sixteen_bits]
    while waiting:
        result = waiting.pop()
        path = os.path.abspath(result.path)
        if path not in found:
            found.add(path)
            waiting.extend(by_name[name] for name in result.imports if name in by_name)
    return found
