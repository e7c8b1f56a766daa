"""Runbook texts: severity, confirmation, causes, remedies, false positives."""

from collections.abc import Mapping

from mp_agent.alerting.guidance.gradients import GRADIENTS
from mp_agent.alerting.guidance.loss import LOSS, LOSS_SCALE
from mp_agent.alerting.guidance.panels import Guidance
from mp_agent.alerting.guidance.runs import RANKS, RUNS
from mp_agent.alerting.guidance.tensors import ACTIVATIONS, OPTIMIZER, REINFORCEMENT, TENSORS

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
