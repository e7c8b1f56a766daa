"""What a check found, and what to do about it."""

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a check went."""

    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the list."""

    verdict: Verdict
    text: str
    remedy: str = ""
    """Empty where nothing is to be done."""


def ok(text: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(Verdict.OK, text)


def wrong(text: str, remedy: str) -> Finding:
    """Return that something is not as it should be, and what to do."""
    return Finding(Verdict.WRONG, text, remedy)


def unknown(text: str, remedy: str = "") -> Finding:
    """Return that something cannot be told from here."""
    return Finding(Verdict.UNKNOWN, text, remedy)
