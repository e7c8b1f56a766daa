"""The record of a rule: what it finds, why that matters, and how to fix it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mp_agent.lint.finding import Edit, FindingSeverity
from mp_agent.lint.interpret.trace import Place, Trace


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
    """Why there is none."""
    find: Callable[[Trace], Iterator[Problem]]
    needs_callers: bool = False
    """Judge a function only by itself if the project never calls it: something may be missing
    there that its callers do."""
    needs_sixteen_bits: bool = False
    """Applies to modules that use 16 bits, or that such modules import."""
    fixable: bool = False
