"""Checks one file: executes its functions on abstract values and applies the rules."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from mp_agent.lint.finding import CodeFinding, InternalError, Problem, Rule
from mp_agent.lint.interpret.interpreter import trace_function, trace_module
from mp_agent.lint.interpret.modules import (
    RELEVANT,
    ModuleInfo,
    Project,
    imported_names,
    module_info,
    module_name,
    parsed,
)
from mp_agent.lint.interpret.values import Trace
from mp_agent.lint.rules import RULES
from mp_agent.lint.source import (
    NotebookText,
    SourceText,
    Suppressions,
    UnreadableSource,
    decoded,
    notebook_text,
    read_bytes,
)

_SIXTEEN_BITS = frozenset({"autocast", "float16", "bfloat16", "half"})
TRAINING = re.compile(r"backward\(|unscale_|[Ss]caler|autocast")
"""A function is also executed alone when functions of its module with these are called."""


@dataclass(frozen=True, slots=True)
class TentativeFinding:
    """A finding that other files may still withdraw."""

    finding: CodeFinding
    rule: str
    function: str
    """Identity of the function that was executed alone."""
    path: str
    """Absolute path of the file in which the finding is."""


@dataclass(slots=True)
class FileResult:
    """What one file contributes."""

    path: str
    module: str = ""
    skipped: str = ""
    candidates: list[TentativeFinding] = field(default_factory=list)
    followed: set[str] = field(default_factory=set)
    """Functions that were executed as part of others."""
    imports: set[str] = field(default_factory=set)
    sixteen_bits: bool = False
    errors: dict[str, InternalError] = field(default_factory=dict)
    """First error of each rule, by rule."""

    def failed(self, rule: str, function: str, error: Exception) -> None:
        """Keep an error of a rule, or of the analysis, on a function."""
        raised = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(raised.filename)}:{raised.lineno}"
        reason = f"{function}: {type(error).__name__}: {error} ({where})"
        self.errors.setdefault(rule, InternalError(self.path, rule, reason))


def check_file(path: str, project: Project) -> FileResult:
    """Check one file; what cannot be read or parsed is skipped, with the reason."""
    result = FileResult(path)
    try:
        source = _source(path)
        if RELEVANT.search(source.text) is None:
            parsed(source.text)
            return result
        module = _module(path, source, project)
        result.module = module.name
        result.imports = set(imported_names(module))
        result.sixteen_bits = bool(module.identifiers & _SIXTEEN_BITS)
        for trace in _traces(module, project, result):
            result.candidates.extend(_candidates(trace, result))
    except UnreadableSource as error:
        result.skipped = str(error)
    except SyntaxError as error:
        result.skipped = f"line {error.lineno}: {error.msg}" if error.lineno else error.msg
    except (RecursionError, MemoryError):
        result.skipped = "nested too deeply"
    except ValueError as error:
        result.skipped = str(error)
    # Files that import this one see the names that it has without following calls.
    project.environments.pop(os.path.abspath(path), None)
    return result


def _source(path: str) -> SourceText:
    content = read_bytes(path)
    return notebook_text(content) if path.endswith(".ipynb") else SourceText(decoded(content))


def _module(path: str, source: SourceText, project: Project) -> ModuleInfo:
    if not isinstance(source, NotebookText):
        module = project.load(path)
        if module is not None:
            return module
    path = os.path.abspath(path)
    name, is_package = module_name(path)
    module = module_info(path, name, is_package, source)
    project.add(module)
    return module


def _traces(module: ModuleInfo, project: Project, result: FileResult) -> Iterator[Trace]:
    """Yield the traces of the module and its functions, except those whose analysis fails."""
    followed = result.followed
    trace = _contained(result, "", "<module>", lambda: trace_module(module, project, followed))
    if trace is not None:
        yield trace
    for function in module.functions:
        if function.matches(RELEVANT) or function.reaches(TRAINING):
            trace = _contained(
                result,
                "",
                function.qualified_name,
                partial(trace_function, function, project, followed),
            )
            if trace is not None:
                yield trace


def _candidates(trace: Trace, result: FileResult) -> Iterator[TentativeFinding]:
    """Yield what the rules find in a trace; a rule that fails there finds nothing."""
    function = trace.name.removeprefix(f"{trace.module.path}:")
    for rule in RULES:
        found = _contained(result, rule.code, function, partial(_found, rule, trace, result.path))
        yield from found or ()


_Made = TypeVar("_Made")


def _contained(
    result: FileResult, rule: str, function: str, make: Callable[[], _Made]
) -> _Made | None:
    """Return what `make` does; None, with the error kept, where it raises.

    Code nested too deeply is no error of a rule: the whole file is skipped for it.
    """
    try:
        return make()
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        result.failed(rule, function, error)
        return None


def _found(rule: Rule, trace: Trace, path: str) -> list[TentativeFinding]:
    found = []
    for problem in rule.find(trace):
        finding = _finding(rule, problem, trace, path)
        if finding is not None:
            place = problem.place.module.path
            found.append(TentativeFinding(finding, rule.code, trace.name, place))
    return found


def _finding(rule: Rule, problem: Problem, trace: Trace, path: str) -> CodeFinding | None:
    module = problem.place.module
    source = module.source
    span = source.span(problem.place.node)
    if Suppressions(source).silence(span, rule.code):
        return None
    shown = path if module is trace.module else module.path
    cell, edits = None, problem.edits
    if isinstance(source, NotebookText):
        cell, line = source.cell_of(span.line)
        moved = line - span.line
        span = type(span)(line, span.column, span.end_line + moved, span.end_column)
        edits = ()
    return CodeFinding(shown, span, rule.code, rule.severity, problem.message, edits, cell)
