"""Detects copies whose gradients no collective reduces."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep

_NEVER_STEPS = 2
"""Consecutive steps on which no two ranks have the gradients that a wrapper says are the same: the
weights of the second one show whether something else keeps them equal."""
_LOST_STEPS = 3
"""Such steps of a run in which gradients were reduced before."""
_PERIODS = 4
"""Periods of averaging that a run must exceed that has averaged its weights before."""
_PLAIN_FACTOR = 8
"""So many times longer may copies that no wrapper explains train alone: DiLoCo does on purpose."""


@dataclass(slots=True, kw_only=True)
class ReductionTracker(Tracker):
    """For how long ranks that hold copies have stepped each with its own gradients.

    Local SGD and its relatives do so on purpose, until they average the weights.
    """

    steps: int = 0
    """Updates since the copies were last equal."""
    longest: int = 0
    """The longest such stretch that ended in equal copies."""
    unreduced: bool = False

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step; of one that was skipped nothing follows."""
        found = step.reduction
        if found is None or step.skipped:
            return
        if not found.apart:
            self.longest = max(self.longest, self.steps)
            # An update from equal weights is the first that leaves them different.
            self.steps, self.unreduced = int(found.parts), False
            return
        self.steps += 1
        limit = context.thresholds["unreduced_steps"] * (1 if found.wrapped else _PLAIN_FACTOR)
        lost = self.steps >= (_LOST_STEPS if found.reduced else _NEVER_STEPS)
        lost &= found.contradicted
        self.unreduced = lost or self.steps >= max(limit, _PERIODS * self.longest)

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return the number of such steps, once nothing but a mistake explains them."""
        return {"unreduced_steps": self.steps if self.unreduced else 0}

    def next_attempt(self) -> "ReductionTracker":
        """Return the state of the next attempt, which averages as often."""
        return type(self)(longest=self.longest)
