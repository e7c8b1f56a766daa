"""One module per family of causes: each yields the diagnoses that a case supports."""

from collections.abc import Callable, Iterator

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.causes.divergence import diverging_loss, explosion, learning_rate
from mp_agent.flight.postmortem.causes.ends import ends, untrained, unusual_batch
from mp_agent.flight.postmortem.causes.nonfinite import (
    gpu_errors,
    never_reduced,
    nonfinite,
    replica_divergence,
)
from mp_agent.flight.postmortem.causes.small_gradients import loss_scale, underflow, vanishing
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
