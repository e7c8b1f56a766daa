"""Finds attention logits and output logits that outgrow those of the run's past.

Both grow for many steps before the loss of a transformer diverges: softmax saturates, and in BF16
numbers above 128 are 1 apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mp_agent.node.accounting.medians import LARGEST, median
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import ATTENTION, LOGITS
from mp_agent.records.health import LogitGrowth
from mp_agent.records.merged import MergedStep

NAMED_AT_MOST = 10
SAMPLES_AT_LEAST = 8
"""Samples before which there is no past to compare with."""
SAMPLES_KEPT = 64
_RECENT = 3


@dataclass(slots=True, kw_only=True)
class Past:
    """Samples of a number over the whole attempt, and the last three of them."""

    kept: list[float] = field(default_factory=list)
    """Every `every`-th sample, oldest first."""
    every: int = 1
    samples: int = 0
    recent: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Add a sample; when too many are kept, every other one is dropped."""
        if self.samples % self.every == 0:
            self.kept = [*self.kept, value]
        if len(self.kept) >= SAMPLES_KEPT:
            self.kept, self.every = self.kept[::2], 2 * self.every
        self.samples += 1
        self.recent = [*self.recent[1 - _RECENT :], value]

    @property
    def growth(self) -> float | None:
        """The last samples, divided by the earlier half of all; None while there are too few."""
        if self.samples < SAMPLES_AT_LEAST:
            return None
        earlier = median(self.kept[: len(self.kept) // 2])
        return min(max(median(self.recent) / max(earlier, 1.0), -LARGEST), LARGEST)


@dataclass(slots=True, kw_only=True)
class LogitTracker(Tracker):
    """The largest attention logit and log-sum-exp of each sample, and the modules above the limit.

    Samples of a checkpoint that was resumed are a past of their own.
    """

    attention: Past = field(default_factory=Past)
    logsumexp: Past = field(default_factory=Past)
    high: tuple[str, ...] = ()
    """Modules above the limit in the last sample, those with the largest logits first."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, if it was sampled."""
        logit = step.families.get(ATTENTION.name, {}).get("logit_max")
        if logit is not None and step.counts(ATTENTION):
            self.attention.add(logit)
        size = _size(step.families.get(LOGITS.name, {}))
        if size is not None and step.counts(LOGITS):
            self.logsumexp.add(size)

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Note which modules are above the limit."""
        if sample.layers.family.name != ATTENTION.name:
            return
        limit = context.thresholds["attention_logit_high"]
        found = [(-view.values.get("logit_max", -LARGEST), view.name) for view in sample.views]
        self.high = tuple(name for logit, name in sorted(found) if -logit > limit)[:NAMED_AT_MOST]

    def health(self, context: AccountContext) -> Mapping[str, Any]:
        """Return the growth of both; None before any was sampled."""
        if not self.attention.samples and not self.logsumexp.samples:
            return {"logits": None}
        recent = self.logsumexp.recent
        found = LogitGrowth(
            attention_growth=self.attention.growth,
            logsumexp_size=recent[-1] if recent else None,
            logsumexp_growth=self.logsumexp.growth,
            high_names=self.high,
        )
        return {"logits": found}


def _size(row: Mapping[str, float]) -> float | None:
    """Return the largest magnitude of a log-sum-exp."""
    ends = [abs(row[name]) for name in ("logsumexp_max", "logsumexp_min") if name in row]
    return max(ends, default=None)
