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
