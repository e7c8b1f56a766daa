"""One module per family of causes: each yields the diagnoses that a case supports."""

from collections.abc import Callable, Iterator

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.causes.batches import unusual_batch
from mp_agent.flight.postmortem.causes.ends import ends
from mp_agent.flight.postmortem.causes.explosion import explosion
from mp_agent.flight.postmortem.causes.hardware import (
    gpu_errors,
    never_reduced,
    replica_divergence,
)
from mp_agent.flight.postmortem.causes.learning_rate import learning_rate
from mp_agent.flight.postmortem.causes.loss import diverging_loss
from mp_agent.flight.postmortem.causes.loss_scale import loss_scale
from mp_agent.flight.postmortem.causes.nonfinite import nonfinite
from mp_agent.flight.postmortem.causes.small_gradients import underflow, vanishing
from mp_agent.flight.postmortem.causes.untrained import untrained
from mp_agent.flight.postmortem.diagnosis import Diagnosis

DETECTORS: tuple[Callable[[Case], Iterator[Diagnosis]], ...] = (
    gpu_errors,
    learning_rate,
    unusual_batch,
    nonfinite,
    loss_scale,
    explosion,
    vanishing,
    underflow,
    untrained,
    diverging_loss,
    never_reduced,
    replica_divergence,
    ends,
)
"""All families of causes."""
