"""The conditions catalog: all records, by what they watch."""

from collections.abc import Mapping

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions.activations.activation_near_overflow import (
    ACTIVATION_NEAR_OVERFLOW,
)
from mp_agent.alerting.conditions.activations.activation_nonfinite import ACTIVATION_NONFINITE
from mp_agent.alerting.conditions.activations.attention_logit_growth import ATTENTION_LOGIT_GROWTH
from mp_agent.alerting.conditions.activations.fp8_saturation import FP8_SATURATION
from mp_agent.alerting.conditions.activations.output_logit_divergence import (
    OUTPUT_LOGIT_DIVERGENCE,
)
from mp_agent.alerting.conditions.activations.router_collapse import ROUTER_COLLAPSE
from mp_agent.alerting.conditions.agent.coverage_low import COVERAGE_LOW
from mp_agent.alerting.conditions.agent.telemetry_degraded import TELEMETRY_DEGRADED
from mp_agent.alerting.conditions.gradients.clipping_before_unscale import CLIPPING_BEFORE_UNSCALE
from mp_agent.alerting.conditions.gradients.gradient_at_floor import GRADIENT_AT_FLOOR
from mp_agent.alerting.conditions.gradients.gradient_explosion import GRADIENT_EXPLOSION
from mp_agent.alerting.conditions.gradients.gradient_underflow import GRADIENT_UNDERFLOW
from mp_agent.alerting.conditions.gradients.gradient_vanishing import GRADIENT_VANISHING
from mp_agent.alerting.conditions.gradients.headroom_vanishing import HEADROOM_VANISHING
from mp_agent.alerting.conditions.gradients.layer_gradient_dead import LAYER_GRADIENT_DEAD
from mp_agent.alerting.conditions.gradients.layer_gradient_explosion import LAYER_GRADIENT_EXPLOSION
from mp_agent.alerting.conditions.gradients.layers_without_gradient import (
    LAYERS_WITHOUT_GRADIENT,
)
from mp_agent.alerting.conditions.gradients.nonfinite_gradients import GRADIENT_NONFINITE
from mp_agent.alerting.conditions.gradients.nonfinite_update import NONFINITE_UPDATE
from mp_agent.alerting.conditions.gradients.nothing_trained import NOTHING_TRAINED
from mp_agent.alerting.conditions.loss.learning_rate_jump import LEARNING_RATE_JUMP
from mp_agent.alerting.conditions.loss.loss_diverging import LOSS_DIVERGING
from mp_agent.alerting.conditions.loss.loss_nonfinite import LOSS_NONFINITE
from mp_agent.alerting.conditions.loss.loss_spike import LOSS_SPIKE
from mp_agent.alerting.conditions.loss_scale.loss_scale_at_floor import LOSS_SCALE_AT_FLOOR
from mp_agent.alerting.conditions.loss_scale.loss_scale_consecutive_decreases import (
    LOSS_SCALE_CONSECUTIVE_DECREASES,
)
from mp_agent.alerting.conditions.loss_scale.loss_scale_far_below_initial import (
    LOSS_SCALE_FAR_BELOW_INITIAL,
)
from mp_agent.alerting.conditions.loss_scale.loss_scale_low import LOSS_SCALE_LOW
from mp_agent.alerting.conditions.loss_scale.loss_scale_low_and_falling import (
    LOSS_SCALE_LOW_AND_FALLING,
)
from mp_agent.alerting.conditions.loss_scale.overflow_ratio_high import OVERFLOW_RATIO_HIGH
from mp_agent.alerting.conditions.optimizer.adam_epsilon_unsafe import ADAM_EPSILON_UNSAFE
from mp_agent.alerting.conditions.optimizer.second_moment_stale import SECOND_MOMENT_STALE
from mp_agent.alerting.conditions.optimizer.updates_lost import UPDATES_LOST
from mp_agent.alerting.conditions.ranks.gradients_not_reduced import GRADIENTS_NOT_REDUCED
from mp_agent.alerting.conditions.ranks.rank_nonfinite import RANK_NONFINITE
from mp_agent.alerting.conditions.ranks.rank_stalled import RANK_STALLED
from mp_agent.alerting.conditions.ranks.rank_straggler import RANK_STRAGGLER
from mp_agent.alerting.conditions.ranks.replica_divergence import REPLICA_DIVERGENCE
from mp_agent.alerting.conditions.reinforcement.train_inference_mismatch import (
    TRAIN_INFERENCE_MISMATCH,
)
from mp_agent.alerting.conditions.run.precision_lint import PRECISION_LINT
from mp_agent.alerting.conditions.run.run_failed import RUN_FAILED
from mp_agent.alerting.conditions.run.run_restarting import RUN_RESTARTING
from mp_agent.alerting.conditions.run.run_stalled import RUN_STALLED
from mp_agent.alerting.conditions.run.run_vanished import RUN_VANISHED
from mp_agent.alerting.conditions.tensors.dimension_imbalance import DIMENSION_IMBALANCE
from mp_agent.alerting.conditions.tensors.reduction_swallows import REDUCTION_SWALLOWS
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
