"""Runbook texts: severity, confirmation, causes, remedies, false positives."""

from collections.abc import Mapping

from mp_agent.alerting.guidance.activations import ACTIVATIONS
from mp_agent.alerting.guidance.gradients import GRADIENTS
from mp_agent.alerting.guidance.loss import LOSS
from mp_agent.alerting.guidance.loss_scale import LOSS_SCALE
from mp_agent.alerting.guidance.optimizer import OPTIMIZER
from mp_agent.alerting.guidance.ranks import RANKS
from mp_agent.alerting.guidance.record import Guidance
from mp_agent.alerting.guidance.reinforcement import REINFORCEMENT
from mp_agent.alerting.guidance.runs import RUNS
from mp_agent.alerting.guidance.tensors import TENSORS

GUIDANCE: Mapping[str, Guidance] = {
    **GRADIENTS,
    **LOSS,
    **LOSS_SCALE,
    **RANKS,
    **RUNS,
    **OPTIMIZER,
    **ACTIVATIONS,
    **REINFORCEMENT,
    **TENSORS,
}
"""By name of the condition."""

__all__ = ["GUIDANCE", "Guidance"]
