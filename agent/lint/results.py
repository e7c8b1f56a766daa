"""What a check of several files found."""

from collections import Counter
from dataclasses import dataclass

from mp_agent.lint.finding import CodeFinding


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that could not be checked, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of a check, in order of file and position."""

    findings: tuple[CodeFinding, ...]
    skipped: tuple[SkippedFile, ...]
    files: int
    """Number of files looked at, those skipped included."""

    def counts(self) -> dict[str, int]:
        """Return the number of findings by rule."""
        return dict(sorted(Counter(finding.code for finding in self.findings).items()))
