"""What measurements on a GPU are to come to, and whether they do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

from benchmarks.machine import markdown

HEADER = ("target", "limit", "measured", "90 % interval", "verdict")


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table, below `HEADER`."""

    what: str
    limit: str
    measured: str
    interval: str
    verdict: str

    def cells(self) -> tuple[str, ...]:
        return self.what, self.limit, self.measured, self.interval, f"**{self.verdict}**"


def verdict(within: Callable[[float], bool], low: float, high: float) -> str:
    """Return "met" or "missed" where the whole interval says so, else "undecided"."""
    if isnan(low) or isnan(high):
        return "undecided"
    ends = within(low), within(high)
    return "met" if all(ends) else "undecided" if any(ends) else "missed"


def not_measured(what: str, limit: str, reason: str) -> Target:
    """Return the line of a target of which nothing is known."""
    return Target(what, limit, "not measured", "", reason)


def table(targets: Sequence[Target]) -> str:
    """Return the targets as Markdown."""
    return markdown(HEADER, (target.cells() for target in targets))
