"""Over how many steps every sample was beyond a limit: a single odd batch spans none."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.catalog.metrics.distribution import fp16_low_headroom
from mp_agent.catalog.metrics.gradients import fp16_headroom, of_fp16
from mp_agent.catalog.metrics.optimizer import below_epsilon, lost_updates
from mp_agent.node.accounting.tracker import AccountContext, LayerObservation, Tracker
from mp_agent.records.columns import DISTRIBUTION, GRADIENTS, OPTIMIZER
from mp_agent.records.merged import MergedStep

_AT_FLOOR_BITS = 0.0015
"""Distance from FP16's smallest number that is rounding."""


@dataclass(slots=True, kw_only=True)
class Sustained(Tracker):
    """The streaks of samples beyond a limit, by the threshold's name."""

    since: dict[str, int] = field(default_factory=dict)
    """Step, counted in the attempt, of the first sample of a streak."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps from there to its last sample; 0 without a streak."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step, as far as it was sampled and counts."""
        limits = context.thresholds
        own = step.families.get(OPTIMIZER.name, {})
        if OPTIMIZER.has_sample(own) and step.counts(OPTIMIZER):
            self._note("updates_lost", step.sequence, lost_updates(own), limits)
            self._note("adam_below_epsilon", step.sequence, below_epsilon(own), limits)
        own = step.families.get(DISTRIBUTION.name, {})
        headroom = fp16_headroom(step)
        if DISTRIBUTION.has_sample(own) and step.counts(DISTRIBUTION) and headroom is not None:
            fits = headroom >= limits["fp16_headroom_bits"]
            flushed = 0.0 if fits else of_fp16("flushed_elements")(own)
            self._note("fp16_flushed", step.sequence, flushed, limits)

    def observe_layers(self, sample: LayerObservation, context: AccountContext) -> None:
        """Add the layers' gradients on a sampled step."""
        health = context.progress.layers.view(context)
        if sample.layers.family is not GRADIENTS or health is None:
            return
        share, judged = health.underflowing_share, context.progress.latest.judged
        self._note("underflow_layers", sample.sequence, share, context.thresholds)
        bits = None if judged is None else fp16_low_headroom(judged)
        at_floor = bool(share) and bits is not None and abs(bits) < _AT_FLOOR_BITS
        self._count("fp16_floor", sample.sequence, is_beyond=at_floor)

    def _note(
        self, limit: str, sequence: int, value: float | None, limits: Mapping[str, float]
    ) -> None:
        self._count(limit, sequence, is_beyond=value is not None and value > limits[limit])

    def _count(self, limit: str, sequence: int, *, is_beyond: bool) -> None:
        if is_beyond:
            self.steps[limit] = sequence - self.since.setdefault(limit, sequence)
        else:
            self.since.pop(limit, None)
            self.steps[limit] = 0
