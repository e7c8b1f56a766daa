"""Results of checks, and remedies."""

from dataclasses import dataclass
from enum import Enum


class CheckStatus(Enum):
    """Status of a check result."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result of a check."""

    verdict: CheckStatus
    text: str
    remedy: str = ""
    """Empty if nothing is to be done."""


def ok(text: str) -> CheckResult:
    """Return a result for something that is in order."""
    return CheckResult(CheckStatus.OK, text)


def wrong(text: str, remedy: str) -> CheckResult:
    """Return a result for a problem, with its remedy."""
    return CheckResult(CheckStatus.WRONG, text, remedy)


def unknown(text: str, remedy: str = "") -> CheckResult:
    """Return a result for something that cannot be determined."""
    return CheckResult(CheckStatus.UNKNOWN, text, remedy)
