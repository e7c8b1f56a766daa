"""One module per family of causes: each yields the diagnoses that a case supports."""

from collections.abc import Callable, Iterator

from mp_agent.flight.case import Case
from mp_agent.flight.causes.ends import ends
from mp_agent.flight.causes.explosion import explosion
from mp_agent.flight.causes.learning_rate import learning_rate
from mp_agent.flight.causes.loss import diverging_loss
from mp_agent.flight.causes.loss_scale import loss_scale
from mp_agent.flight.causes.nonfinite import nonfinite
from mp_agent.flight.causes.small_gradients import underflow, vanishing
from mp_agent.flight.diagnosis import Diagnosis

DETECTORS: tuple[Callable[[Case], Iterator[Diagnosis]], ...] = (
    learning_rate,
    nonfinite,
    loss_scale,
    explosion,
    vanishing,
    underflow,
    diverging_loss,
    ends,
)
"""All families of causes."""
