"""The conditions catalog: all records, by what they watch."""

from collections.abc import Mapping

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions.activations import (
    ACTIVATION_NEAR_OVERFLOW,
    ATTENTION_LOGIT_GROWTH,
    FP8_SATURATION,
    OUTPUT_LOGIT_DIVERGENCE,
    ROUTER_COLLAPSE,
)
from mp_agent.alerting.conditions.agent import COVERAGE_LOW, TELEMETRY_DEGRADED
from mp_agent.alerting.conditions.gradient_layers import (
    GRADIENT_UNDERFLOW,
    LAYER_GRADIENT_DEAD,
    LAYER_GRADIENT_EXPLOSION,
    LAYERS_WITHOUT_GRADIENT,
    NOTHING_TRAINED,
)
from mp_agent.alerting.conditions.gradient_size import (
    GRADIENT_AT_FLOOR,
    GRADIENT_EXPLOSION,
    GRADIENT_VANISHING,
    HEADROOM_VANISHING,
)
from mp_agent.alerting.conditions.loss import LEARNING_RATE_JUMP, LOSS_DIVERGING, LOSS_SPIKE
from mp_agent.alerting.conditions.loss_scale import (
    LOSS_SCALE_AT_FLOOR,
    LOSS_SCALE_CONSECUTIVE_DECREASES,
    LOSS_SCALE_FAR_BELOW_INITIAL,
    LOSS_SCALE_LOW,
    LOSS_SCALE_LOW_AND_FALLING,
)
from mp_agent.alerting.conditions.nonfinite import (
    ACTIVATION_NONFINITE,
    CLIPPING_BEFORE_UNSCALE,
    GRADIENT_NONFINITE,
    LOSS_NONFINITE,
    NONFINITE_UPDATE,
    RANK_NONFINITE,
)
from mp_agent.alerting.conditions.optimizer import (
    ADAM_EPSILON_UNSAFE,
    SECOND_MOMENT_STALE,
    UPDATES_LOST,
)
from mp_agent.alerting.conditions.overflows import OVERFLOW_RATIO_HIGH
from mp_agent.alerting.conditions.ranks import (
    GRADIENTS_NOT_REDUCED,
    RANK_STALLED,
    RANK_STRAGGLER,
    REPLICA_DIVERGENCE,
)
from mp_agent.alerting.conditions.run import (
    PRECISION_LINT,
    RUN_FAILED,
    RUN_RESTARTING,
    RUN_STALLED,
    RUN_VANISHED,
)
from mp_agent.alerting.conditions.tensors import (
    DIMENSION_IMBALANCE,
    REDUCTION_SWALLOWS,
    TRAIN_INFERENCE_MISMATCH,
)
from mp_agent.errors import CatalogError

GROUPS: Mapping[str, tuple[Condition, ...]] = {
    "gradients": (
        GRADIENT_EXPLOSION,
        GRADIENT_VANISHING,
        GRADIENT_UNDERFLOW,
        GRADIENT_AT_FLOOR,
        LAYER_GRADIENT_DEAD,
        LAYER_GRADIENT_EXPLOSION,
        LAYERS_WITHOUT_GRADIENT,
        NONFINITE_UPDATE,
        GRADIENT_NONFINITE,
        CLIPPING_BEFORE_UNSCALE,
        NOTHING_TRAINED,
        HEADROOM_VANISHING,
    ),
    "loss": (LOSS_NONFINITE, LOSS_SPIKE, LOSS_DIVERGING, LEARNING_RATE_JUMP),
    "loss-scale": (
        LOSS_SCALE_LOW_AND_FALLING,
        LOSS_SCALE_AT_FLOOR,
        LOSS_SCALE_CONSECUTIVE_DECREASES,
        LOSS_SCALE_FAR_BELOW_INITIAL,
        LOSS_SCALE_LOW,
        OVERFLOW_RATIO_HIGH,
    ),
    "ranks": (
        RANK_NONFINITE,
        RANK_STALLED,
        RANK_STRAGGLER,
        GRADIENTS_NOT_REDUCED,
        REPLICA_DIVERGENCE,
    ),
    "run": (RUN_STALLED, RUN_FAILED, RUN_RESTARTING, RUN_VANISHED, PRECISION_LINT),
    "agent": (COVERAGE_LOW, TELEMETRY_DEGRADED),
    "optimizer": (SECOND_MOMENT_STALE, UPDATES_LOST, ADAM_EPSILON_UNSAFE),
    "activations": (
        ACTIVATION_NONFINITE,
        ACTIVATION_NEAR_OVERFLOW,
        ATTENTION_LOGIT_GROWTH,
        OUTPUT_LOGIT_DIVERGENCE,
        ROUTER_COLLAPSE,
        FP8_SATURATION,
    ),
    "reinforcement": (TRAIN_INFERENCE_MISMATCH,),
    "tensors": (REDUCTION_SWALLOWS, DIMENSION_IMBALANCE),
}
"""Rule group to its conditions, in the order in which they are rendered."""

CONDITIONS: tuple[Condition, ...] = tuple(
    condition for conditions in GROUPS.values() for condition in conditions
)
if len({condition.name for condition in CONDITIONS}) != len(CONDITIONS):
    raise CatalogError("two conditions share a name")

__all__ = ["CONDITIONS", "GROUPS", "Condition"]
