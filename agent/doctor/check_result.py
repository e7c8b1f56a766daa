"""What a check found, and what to do about it."""

from dataclasses import dataclass
from enum import Enum


class CheckStatus(Enum):
    """How a check went."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the list."""

    verdict: CheckStatus
    text: str
    remedy: str = ""
    """Empty where nothing is to be done."""


def ok(text: str) -> CheckResult:
    """Return that something is as it should be."""
    return CheckResult(CheckStatus.OK, text)


def wrong(text: str, remedy: str) -> CheckResult:
    """Return that something is not as it should be, and what to do."""
    return CheckResult(CheckStatus.WRONG, text, remedy)


def unknown(text: str, remedy: str = "") -> CheckResult:
    """Return that something cannot be told from here."""
    return CheckResult(CheckStatus.UNKNOWN, text, remedy)
