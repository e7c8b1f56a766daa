"""One attempt of a run as a diagnosis reads it: evidence, merged history, what was judged."""

from collections.abc import Sequence
from functools import cached_property
from math import log2

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.durations import duration
from mp_agent.alerting.values import Severity
from mp_agent.catalog.thresholds import BY_NAME
from mp_agent.flight.postmortem.diagnosis import LayerSample, RunHistory, Usual
from mp_agent.flight.record.evidence import Evidence
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.merged import MergedStep

FP16_MAX = 65504.0
_WORST_FIRST = tuple(severity.value for severity in Severity)
_KNOWN = frozenset(condition.name for condition in CONDITIONS)
_NEAR_STEPS = 10
"""During an incident, layers are sampled on three consecutive steps and then on every tenth."""
_UNKNOWN = Usual(loss=None, loss_bound=None, norm=None, loss_above=False, exploded=False)


class Case:
    """One attempt of a run: its evidence, merged. Never changes."""

    def __init__(self, evidence: Evidence, history: RunHistory) -> None:
        self.evidence = evidence
        self.history = history
        self.steps = history.steps

    @cached_property
    def judged(self) -> tuple[MergedStep, ...]:
        """Steps whose norms count: complete, finite, not skipped."""
        return tuple(step for step in self.steps if step.gradients_judged)

    @cached_property
    def conditions(self) -> tuple[ActiveCondition, ...]:
        """What the steps show, then what the run had that they do not show, or not as severely.

        Only a longer past, or another part of the run, shows the latter.
        """
        again = {(one.name, severity) for one in self.history.conditions for severity in _from(one)}
        live = (one for one in self.evidence.conditions if one.name in _KNOWN and _from(one))
        new = (one for one in live if (one.name, one.severity) not in again)
        return (*self.history.conditions, *new)

    @cached_property
    def origin(self) -> MergedStep | None:
        """The first step of the latest incident with NaN or Inf, if it is kept."""
        if self.history.first_nonfinite is None:
            return None
        return self.step_at(self.history.first_nonfinite_sequence)

    @cached_property
    def world_size(self) -> int:
        """Ranks of the run, seen or not."""
        return self.evidence.identity.world_size

    @property
    def has_scaler(self) -> bool:
        """Whether a GradScaler scaled the loss."""
        return any(step.loss_scale is not None for step in self.steps)

    @property
    def in_fp16(self) -> bool:
        """Whether the forward pass is in FP16."""
        return "fp16" in self.evidence.facts.get("precision", "")

    def limit(self, name: str) -> float:
        """Return a threshold that the run was judged by."""
        return self.evidence.values.limit(BY_NAME[name])

    def seconds(self, name: str) -> float:
        """Return a duration that the run was judged by."""
        return self.evidence.values.seconds[duration(name).name]

    def usual(self, step: MergedStep) -> Usual:
        """Return what the account compared a step with."""
        return self.history.usual.get(step.sequence, _UNKNOWN)

    def step_at(self, sequence: int) -> MergedStep | None:
        """Return the merged step of a sequence number, if it was kept."""
        return self._by_sequence.get(sequence)

    def number_of(self, sequence: int) -> int:
        """Return the trainer's number of a step, extrapolated if the step was not kept."""
        if step := self.step_at(sequence):
            return step.step
        nearest = min(self.steps, key=lambda s: abs(s.sequence - sequence), default=None)
        return sequence if nearest is None else nearest.step + sequence - nearest.sequence

    def sequence_of(self, number: int) -> int:
        """Return the sequence number of a step of the trainer's, likewise."""
        nearest = min(self.steps, key=lambda s: abs(s.step - number), default=None)
        return number if nearest is None else nearest.sequence + number - nearest.step

    def since(self, sequence: int) -> tuple[MergedStep, ...]:
        """Return a step and all after it."""
        return tuple(step for step in self.steps if step.sequence >= sequence)

    def before(self, sequence: int, count: int) -> tuple[MergedStep, ...]:
        """Return the last `count` steps before one."""
        return tuple(step for step in self.steps if sequence - count <= step.sequence < sequence)

    def layers_at(self, sequence: int) -> LayerSample | None:
        """Return the layers of a step, or of the first sample within ten steps after it."""
        near = range(sequence, sequence + _NEAR_STEPS + 1)
        return next((table for table in self.history.tables if table.sequence in near), None)

    def losses(self, steps: Sequence[MergedStep]) -> list[float]:
        """Return the finite losses of some steps."""
        return [loss for step in steps if (loss := step.get("loss")) is not None]

    @cached_property
    def _by_sequence(self) -> dict[int, MergedStep]:
        return {step.sequence: step for step in self.steps}


def _from(condition: ActiveCondition) -> tuple[str, ...]:
    """Return the severities of a condition and those that are milder; none of an unknown one."""
    severity = condition.severity
    return _WORST_FIRST[_WORST_FIRST.index(severity) :] if severity in _WORST_FIRST else ()


def norm_of(step: MergedStep) -> float:
    """Return the norm of a judged step."""
    return step.grad_norm or 0.0


def headroom_bits(step: MergedStep) -> float | None:
    """Return how often the scaled gradients could double before FP16 overflows.

    None without a scaler, and where the finite gradients are all zero.
    """
    scale, largest = step.loss_scale, step.get("abs_max")
    if not scale or not largest:
        return None
    return log2(FP16_MAX) - log2(scale) - log2(largest)
