"""Findings, rules and results."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from mp_agent.lint.interpret.values import Place, Trace


class FindingSeverity(Enum):
    """How bad a finding is; the values are those of SARIF and of GitHub annotations."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A stretch of source: lines count from 1, columns from 0, in characters."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces the text of a span; an empty span inserts."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class CodeFinding:
    """One mistake in one file. `path` is as the file was named, or found, by the caller."""

    path: str
    span: Span
    code: str
    severity: FindingSeverity
    message: str
    edits: tuple[Edit, ...] = ()
    """All of them together fix it; empty where no edit is safe."""
    cell: int | None = None
    """Number of the code cell in a notebook, from 1; lines count within it."""

    @property
    def sort_key(self) -> tuple[str, int, Span, str]:
        """Order of reports: by file, cell, position, and code."""
        return (self.path, self.cell or 0, self.span, self.code)


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that could not be checked, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class InternalError:
    """An error of the check itself; the other rules and files were checked."""

    path: str
    rule: str
    """Code of the rule that failed; empty where the analysis of a function did."""
    reason: str
    """What was being looked at, the exception, and where in mp_agent it was raised."""

    @property
    def message(self) -> str:
        """What failed, and why."""
        return f"internal error of {self.rule or 'the analysis'}: {self.reason}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of a check, in order of file and position."""

    findings: tuple[CodeFinding, ...]
    skipped: tuple[SkippedFile, ...]
    files: int
    """Number of files looked at, those skipped included."""
    errors: tuple[InternalError, ...] = ()
    """What failed in the check itself, at most once per file and rule."""

    def counts(self) -> dict[str, int]:
        """Return the number of findings by rule."""
        return dict(sorted(Counter(finding.code for finding in self.findings).items()))


@dataclass(frozen=True, slots=True)
class Problem:
    """A place that breaks a rule."""

    place: Place
    message: str
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. The texts are Markdown; the examples are whole files, and tests."""

    code: str
    name: str
    severity: FindingSeverity
    summary: str
    explanation: str
    bad: str
    good: str
    remedy: str
    alert: str
    """Name of the alert that fires when the mistake reaches a run; empty where none does."""
    no_alert: str = ""
    """Why there is no alert."""
    find: Callable[[Trace], Iterator[Problem]]
    needs_callers: bool = False
    """Judge a function alone only if the project never calls it: something may be missing
    there that its callers do."""
    needs_sixteen_bits: bool = False
    """Applies to modules that use 16 bits, or that such modules import."""
    fixable: bool = False
