"""A learning rate that leaves the range in which the run was trained."""

from collections.abc import Iterator

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.diagnosis import MEDIUM, STRONG, WEAK, Argument, Causes, Diagnosis
from mp_agent.records.merged import MergedStep

_WARM_UP_STEPS = 100
"""As in the node agent: any rise during warm-up is normal."""
_BEFORE_MIN = 10
_AFTER_STEPS = 50


def learning_rate(case: Case) -> Iterator[Diagnosis]:
    """Yield the first step whose learning rate was far above all that were kept before it."""
    highest, seen = 0.0, 0
    for step in case.steps:
        rate = step.get("learning_rate")
        if rate is None:
            continue
        settled = seen >= _BEFORE_MIN and step.sequence > _WARM_UP_STEPS
        if settled and highest > 0.0 and rate >= case.limit("learning_rate_jump") * highest:
            yield _jump(case, step, highest, rate)
            return
        highest, seen = max(highest, rate), seen + 1


def _jump(case: Case, step: MergedStep, highest: float, rate: float) -> Diagnosis:
    text = f"The learning rate rose from {highest:.3g} to {rate:.3g}, {rate / highest:.3g}-fold."
    arguments_for = [Argument(text, STRONG)]
    after = [s for s in case.steps if 0 <= s.sequence - step.sequence <= _AFTER_STEPS]
    band = case.loss_band(step.sequence)
    losses = case.losses(after)
    if band and losses and max(losses) > band[1]:
        text = f"The loss then left its baseline of {band[0]:.3g}, to {max(losses):.3g}."
        arguments_for.append(Argument(text, MEDIUM))
    elif any(s.flag("loss_nonfinite") for s in after):
        arguments_for.append(Argument("The loss then was NaN or Inf.", MEDIUM))
    if any(s.gradient_nonfinite_elements > 0 for s in after):
        arguments_for.append(Argument("Gradients then were NaN or Inf.", WEAK))
    return Diagnosis(
        cause=Causes.LEARNING_RATE_JUMP.value,
        sequence=step.sequence,
        step=step.step,
        phase="optimizer",
        arguments_for=tuple(arguments_for),
    )
