"""Checks files: which ones, with which settings, by which rules."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mp_agent.errors import SettingError
from mp_agent.inputs.files import read_file
from mp_agent.inputs.workers import worker_processes
from mp_agent.lint.analysis import FileResult, TentativeFinding, check_file
from mp_agent.lint.finding import CheckReport, CodeFinding, SkippedFile
from mp_agent.lint.interpret.modules import Project
from mp_agent.lint.rules import BY_CODE

SUFFIXES = (".py", ".ipynb")
_NEVER = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env"})


def find_files(paths: Iterable[str], excluded: Callable[[str], bool]) -> list[str]:
    """Return the files below the paths, each once, in a fixed order.

    Folders are searched for Python files and notebooks, except in hidden ones and in environments;
    links to folders are not followed. A file that is named is taken whatever its name. Raises
    SettingError when a path does not exist.
    """
    found: dict[str, str] = {}
    for path in paths:
        if os.path.isdir(path):
            for file in _walk(path):
                if not excluded(file):
                    found.setdefault(os.path.realpath(file), file)
        elif os.path.exists(path):
            found.setdefault(os.path.realpath(path), path)
        else:
            raise SettingError(f"{path!r} does not exist")
    return sorted(found.values())


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _NEVER
        )
        for name in sorted(files):
            if name.endswith(SUFFIXES):
                yield os.path.normpath(os.path.join(parent, name))


def relative(path: str, base: Path) -> str:
    """Return a path relative to a folder, with slashes; as it is where it lies elsewhere."""
    try:
        return Path(os.path.abspath(path)).relative_to(base).as_posix()
    except ValueError:
        return Path(path).as_posix()


_FILE_BYTES_MAX = 8 << 20
_TABLE = "tool.mp-agent.check"


_ON_PURPOSE = ("MP101", "MP102", "MP114", "MP115", "MP117", "MP119", "MP120", "MP221")
_OF_TESTS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("tests/*", "*/tests/*", "test_*.py", "*/test_*.py"), _ON_PURPOSE
)
"""Tests compute in 16 bits, and read and keep their losses, on purpose."""


class CheckSettings(BaseModel):
    """Which rules apply where. Patterns are relative to the folder of pyproject.toml."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )

    select: tuple[str, ...] = ()
    """Codes, or beginnings of codes, to apply; all where it is empty."""
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out; `*` matches `/` as well."""
    per_path_ignore: dict[str, tuple[str, ...]] = Field(default_factory=lambda: dict(_OF_TESTS))

    @field_validator("select", "ignore")
    @classmethod
    def _known(cls, codes: tuple[str, ...]) -> tuple[str, ...]:
        for code in codes:
            known_code(code)
        return codes

    @field_validator("per_path_ignore")
    @classmethod
    def _known_by_path(cls, paths: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for codes in paths.values():
            cls._known(codes)
        return paths

    def excludes(self, path: str) -> bool:
        """Return whether a path, relative and with slashes, is left out."""
        return any(_matches(path, pattern) for pattern in self.exclude)

    def applies(self, code: str, path: str) -> bool:
        """Return whether findings of a rule are wanted in a file."""
        if self.select and not code.startswith(self.select):
            return False
        if self.ignore and code.startswith(self.ignore):
            return False
        return not any(
            _matches(path, pattern) and code.startswith(tuple(codes))
            for pattern, codes in self.per_path_ignore.items()
        )


def known_code(code: str) -> str:
    """Return a code, or the beginning of codes; raises ValueError for any other text."""
    if not code or not any(known.startswith(code) for known in BY_CODE):
        raise ValueError(f"{code!r} is no rule; there are {', '.join(BY_CODE)}")
    return code


def load_settings(folder: Path) -> tuple[CheckSettings, Path]:
    """Return the settings that apply to a folder, and the folder that their patterns start from.

    They come from the closest pyproject.toml with such a table, in the folder or above it.
    Raises SettingError, naming the file, the field and its value.
    """
    folder = folder.resolve()
    for candidate in (folder, *folder.parents):
        file = candidate / "pyproject.toml"
        table = _table(file) if file.is_file() else None
        if table is not None:
            return _validated(table, file), candidate
    return CheckSettings(), folder


def _table(file: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(read_file(file, _FILE_BYTES_MAX).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{file} cannot be read: {error}") from error
    table: Any = document
    for name in _TABLE.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SettingError(f"{file}: {_TABLE} is {table!r}, not a table")
    return table


def _validated(table: dict[str, Any], file: Path) -> CheckSettings:
    try:
        return CheckSettings.model_validate(table)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise SettingError(f"{file}: {_TABLE}.{field} = {problem['input']!r}: {message}") from error


def merged(settings: CheckSettings, select: Iterable[str], ignore: Iterable[str]) -> CheckSettings:
    """Return the settings with what a command or a call adds; `select` replaces."""
    select, ignore = tuple(select), tuple(ignore)
    for name, codes in (("select", select), ("ignore", ignore)):
        for code in codes:
            try:
                known_code(code)
            except ValueError as error:
                raise SettingError(f"{name}: {error}") from error
    return settings.model_copy(
        update={"select": select or settings.select, "ignore": (*settings.ignore, *ignore)}
    )


def _matches(path: str, pattern: str) -> bool:
    pattern = pattern.rstrip("/")
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*")


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
    with worker_processes(min(jobs, len(tasks))) as pool:
        futures = [pool.submit(_check, task) for task in tasks]
        return [result for future in futures for result in future.result()]


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


def inputs_of(names: Sequence[str]) -> list[str | Path]:
    """Return the files that a check of the paths reads; raises SettingError for a wrong path."""
    settings, base = _settings_of(names)
    files = find_files(names, lambda path: settings.excludes(relative(path, base)))
    return [base / "pyproject.toml", *files]


def _settings_of(names: Sequence[str]) -> tuple[CheckSettings, Path]:
    """Return the settings of the first path, and the folder that their patterns start from."""
    first = Path(names[0]) if names else Path()
    return load_settings(first if first.is_dir() else first.parent)


def check_paths(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    jobs: int = 1,
) -> CheckReport:
    """Check files and folders; raises SettingError for a wrong path, code or setting."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    names = [os.fspath(path) for path in given]
    settings, base = _settings_of(names)
    settings = merged(settings, select, ignore)
    files = find_files(names, lambda path: settings.excludes(relative(path, base)))
    return run(files, lambda code, path: settings.applies(code, relative(path, base)), jobs=jobs)
