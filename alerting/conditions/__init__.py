"""The conditions catalog: all records, by what they watch."""

from collections.abc import Mapping

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import (
    activations,
    agent,
    batches,
    departures,
    gradient_layers,
    gradient_size,
    loop,
    loss,
    loss_scale,
    mixed_precision,
    model_use,
    nonfinite,
    optimizer,
    parameters,
    ranks,
    run,
    tensors,
)
from mp_agent.errors import CatalogError

GROUPS: Mapping[str, tuple[Condition, ...]] = {
    "gradients": (
        *gradient_size.CONDITIONS,
        *gradient_layers.CONDITIONS,
        *nonfinite.OF_GRADIENTS,
        departures.GRADIENT_NORM_GROWN,
    ),
    "loss": (
        *nonfinite.OF_LOSS,
        *loss.CONDITIONS,
        *model_use.OF_LOSS,
        departures.LOSS_RELAPSED,
    ),
    "loss-scale": (*loss_scale.CONDITIONS, *mixed_precision.CONDITIONS),
    "loop": (
        *loop.CONDITIONS,
        *model_use.OF_MODE,
        mixed_precision.AUTOCAST_WITHOUT_EFFECT,
    ),
    "ranks": (*nonfinite.OF_RANKS, *ranks.CONDITIONS, *batches.OF_RANK_LOSSES),
    "batches": batches.CONDITIONS,
    "run": run.CONDITIONS,
    "agent": agent.CONDITIONS,
    "optimizer": (*parameters.CONDITIONS, *optimizer.CONDITIONS),
    "activations": (*nonfinite.OF_ACTIVATIONS, *activations.CONDITIONS),
    "reinforcement": tensors.OF_LOGPROBS,
    "tensors": tensors.OF_TENSORS,
    "baseline": (departures.UNLIKE_BASELINE,),
}
"""Rule group to its conditions, in the order in which they are rendered."""

CONDITIONS: tuple[Condition, ...] = tuple(
    condition for conditions in GROUPS.values() for condition in conditions
)
if len({condition.name for condition in CONDITIONS}) != len(CONDITIONS):
    raise CatalogError("two conditions share a name")

__all__ = ["CONDITIONS", "GROUPS", "Condition"]
