"""Usual step time, and how long a run has made no progress."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.node.accounting.medians import median
from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import Phase

_TRAINING = frozenset(
    phase.name.lower() for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)
_IN_TRAINING = "training"
_HALF_LIFE_SECONDS = 12 * 3600.0
_KINDS_AT_MOST = 16


@dataclass(slots=True)
class _Longest:
    """The longest pause of a kind, at its full length when it ended."""

    seconds: float
    ended_seconds: float

    def decayed(self, now_seconds: float) -> float:
        age_seconds = max(now_seconds - self.ended_seconds, 0.0)
        return self.seconds * float(0.5 ** (age_seconds / _HALF_LIFE_SECONDS))


class Standstill:
    """Tracks when the run last completed a step or changed the kind of its phase.

    A pause in training that ended was no hang: a rollout of an RL trainer, an unmarked evaluation.
    The longest one is remembered and decays, since such pauses recur; likewise the longest
    evaluation, the longest checkpoint and that of each other phase outside training.
    Times are those of a monotonic clock.
    """

    def __init__(self) -> None:
        """Start without any step."""
        self._mark: tuple[str, int, str] | None = None
        self._since_seconds = 0.0
        self._longest: dict[str, _Longest] = {}
        """By the kind of phase during the pause."""

    def update(self, attempt: str, sequence: int, phase_name: str, now_seconds: float) -> None:
        """Note the run's attempt, its last step, and the phase of the rank furthest behind."""
        kind = _IN_TRAINING if phase_name in _TRAINING else phase_name
        mark = (attempt, sequence, kind)
        if mark == self._mark:
            return
        before = self._mark
        if before is not None and before[0] == attempt and before[1]:
            self._remember(before[2], now_seconds - self._since_seconds, now_seconds)
        self._mark, self._since_seconds = mark, now_seconds

    def seconds(self, now_seconds: float) -> float | None:
        """Return the time since the last progress; None before the first update."""
        return None if self._mark is None else max(now_seconds - self._since_seconds, 0.0)

    def longest_pause_seconds(self, now_seconds: float) -> float:
        """Return the longest pause in training that ended, decayed with its age."""
        return self._decayed(_IN_TRAINING, now_seconds) or 0.0

    def longest_phase_seconds(self, now_seconds: float) -> float | None:
        """Return the longest of the current phase outside training, decayed with its age.

        None in training, and if no such phase has ended since the first step.
        """
        if self._mark is None or self._mark[2] == _IN_TRAINING:
            return None
        return self._decayed(self._mark[2], now_seconds)

    def _decayed(self, kind: str, now_seconds: float) -> float | None:
        longest = self._longest.get(kind)
        return None if longest is None else longest.decayed(now_seconds)

    def _remember(self, kind: str, seconds: float, now_seconds: float) -> None:
        known = self._longest.get(kind)
        if known is None and len(self._longest) >= _KINDS_AT_MOST:
            return
        if known is None or seconds >= known.decayed(now_seconds):
            self._longest[kind] = _Longest(seconds, now_seconds)


_STEPS = 64


@dataclass(slots=True, kw_only=True)
class Pace(Tracker):
    """Remembers the last step times; a compilation or a checkpoint does not affect the median."""

    seconds: list[float] = field(default_factory=list)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step."""
        self.fold(step.get("step_seconds"))

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return the usual step time."""
        return {"usual_step_seconds": self.usual_seconds}

    def fold(self, step_seconds: float | None) -> None:
        """Add a step's time, if it is known."""
        if step_seconds is not None:
            self.seconds = [*self.seconds[1 - _STEPS :], step_seconds]

    @property
    def usual_seconds(self) -> float | None:
        """The median; None before the first."""
        return median(self.seconds) if self.seconds else None
