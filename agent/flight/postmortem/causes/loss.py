"""A loss that leaves its baseline and does not recover."""

from collections.abc import Iterator
from statistics import median

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.diagnosis import MEDIUM, WEAK, Argument, Causes, Diagnosis

_RISEN_MIN = 5
_FACTOR = 1.2


def diverging_loss(case: Case) -> Iterator[Diagnosis]:
    """Yield that the loss ended above what it was in the first half of the record."""
    observed = [step for step in case.steps if step.get("loss") is not None]
    if not observed:
        return
    middle = observed[len(observed) // 2].sequence
    band = case.loss_band(middle)
    if band is None:
        return
    usual, limit = band
    risen = []
    for step in reversed(observed):
        loss = step.get("loss") or 0.0
        if loss <= limit or loss <= usual + (_FACTOR - 1.0) * abs(usual):
            break
        risen.append(step)
    if len(risen) < _RISEN_MIN:
        return
    first = risen[-1]
    last = median(case.losses(risen[:_RISEN_MIN]))
    text = (
        f"The loss was {last:.3g} at the end, above its baseline of {usual:.3g} (bound: "
        f"{limit:.3g}) on the last {len(risen)} steps."
    )
    arguments_for = [Argument(text, MEDIUM)]
    if len(risen) >= case.limit("loss_lost_steps"):
        arguments_for.append(Argument("It did not recover.", WEAK))
    yield Diagnosis(
        cause=Causes.LOSS_DIVERGING.value,
        sequence=first.sequence,
        step=first.step,
        phase="forward",
        arguments_for=tuple(arguments_for),
    )
