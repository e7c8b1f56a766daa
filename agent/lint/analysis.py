"""Checks one file: executes its functions on abstract values and applies the rules."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mp_agent.lint.finding import CodeFinding
from mp_agent.lint.interpret.interpreter import trace_function, trace_module
from mp_agent.lint.interpret.modules import RELEVANT, ModuleInfo, module_info
from mp_agent.lint.interpret.project import Project, absolute_name, module_name
from mp_agent.lint.interpret.trace import Trace
from mp_agent.lint.rule import Problem, Rule
from mp_agent.lint.rules import RULES
from mp_agent.lint.source.files import UnreadableSource, decoded, read_bytes
from mp_agent.lint.source.notebook import NotebookText, notebook_text
from mp_agent.lint.source.suppressions import Suppressions
from mp_agent.lint.source.text import SourceText

_SIXTEEN_BITS = frozenset({"autocast", "float16", "bfloat16", "half"})
TRAINING = re.compile(r"backward\(|unscale_|[Ss]caler|autocast")
"""A function is also executed by itself when functions of its module with these are called."""


@dataclass(frozen=True, slots=True)
class TentativeFinding:
    """A finding that other files may still withdraw."""

    finding: CodeFinding
    rule: str
    function: str
    """Identity of the function that was executed by itself."""
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


def check_file(path: str, project: Project) -> FileResult:
    """Check one file; what cannot be read or parsed is skipped, with the reason."""
    result = FileResult(path)
    try:
        source = _source(path)
        if RELEVANT.search(source.text) is None:
            return result
        module = _module(path, source, project)
        result.module = module.name
        result.imports = set(_imports(module))
        result.sixteen_bits = bool(module.identifiers & _SIXTEEN_BITS)
        for trace in _traces(module, project, result.followed):
            result.candidates.extend(_candidates(trace, path))
    except UnreadableSource as error:
        result.skipped = str(error)
    except SyntaxError as error:
        result.skipped = f"line {error.lineno}: {error.msg}"
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
    name, is_package = module_name(path)
    module = module_info(path, name, is_package, source)
    project.add(module)
    return module


def _traces(module: ModuleInfo, project: Project, followed: set[str]) -> Iterator[Trace]:
    yield trace_module(module, project, followed)
    for function in module.functions:
        if function.matches(RELEVANT) or function.reaches(TRAINING):
            yield trace_function(function, project, followed)


def _candidates(trace: Trace, path: str) -> Iterator[TentativeFinding]:
    for rule in RULES:
        for problem in rule.find(trace):
            finding = _finding(rule, problem, trace, path)
            if finding is not None:
                yield TentativeFinding(finding, rule.code, trace.name, problem.place.module.path)


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


def _imports(module: ModuleInfo) -> Iterator[str]:
    for node in module.imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = absolute_name(node.module or "", node.level, module)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
