"""What a rule reports, and where."""

from dataclasses import dataclass
from enum import Enum


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
