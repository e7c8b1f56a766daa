"""All rules, in modules by what they are about."""

from mp_agent.errors import CatalogError
from mp_agent.lint.finding import Rule
from mp_agent.lint.rules.autocast import (
    BACKWARD_UNDER_AUTOCAST,
    BINARY_CROSS_ENTROPY,
    DEPRECATED_AMP,
    LOSS_OUTSIDE_AUTOCAST,
)
from mp_agent.lint.rules.casts import CAST_INPUT, CAST_MODEL
from mp_agent.lint.rules.cost import DETECT_ANOMALY, ODD_DIMENSION, SYNC_EACH_STEP
from mp_agent.lint.rules.data import FIRST_BATCH, SHARED_GENERATOR
from mp_agent.lint.rules.distributed import (
    BYPASSED_WRAPPER,
    NEVER_SYNCHRONIZED,
    UNSHARDED_DATA,
)
from mp_agent.lint.rules.evaluation import EVALUATED_IN_TRAINING_MODE
from mp_agent.lint.rules.gradients import (
    CLEARED_UNUSED,
    CLIPPED_AFTER_STEP,
    GRADIENTS_ADD_UP,
    STEP_BEFORE_BACKWARD,
)
from mp_agent.lint.rules.loop import (
    ACCUMULATION_BYPASSED,
    FREEZING_WITHOUT_EFFECT,
    LEFT_IN_EVALUATION,
    NOT_CALLED,
)
from mp_agent.lint.rules.losses import LOSSES_KEPT, REBUILT_LOSS
from mp_agent.lint.rules.numerics import (
    ACTIVATION_BEFORE_LOSS,
    ADAM_EPSILON,
    BATCH_NORM_MOMENTUM,
    CANCELLING_VARIANCE,
    LOW_PRECISION_FUNCTION,
    LOW_PRECISION_REDUCTION,
)
from mp_agent.lint.rules.optimizers import (
    REMADE_OPTIMIZER,
    RESUME_WITHOUT_OPTIMIZER,
    STALE_OPTIMIZER,
    SWAPPED_BETAS,
)
from mp_agent.lint.rules.reinforcement import REINFORCEMENT_IN_BF16
from mp_agent.lint.rules.scaling import (
    CLIP_WITHOUT_UNSCALE,
    FP16_WITHOUT_SCALER,
    SCALER_WITH_BF16,
    STEP_BYPASSES_SCALER,
    STEP_WITHOUT_UPDATE,
    UNSCALE_TWICE,
)
from mp_agent.lint.rules.targets import PADDING_COUNTS, TARGETS_ARE_INPUTS
from mp_agent.lint.rules.updates import (
    CLIPPED_ONE_BY_ONE,
    SCHEDULE_FIRST,
    SCHEDULE_STEPPED_TWICE,
)

RULES: tuple[Rule, ...] = (
    CAST_MODEL,
    CAST_INPUT,
    LOSS_OUTSIDE_AUTOCAST,
    BINARY_CROSS_ENTROPY,
    BACKWARD_UNDER_AUTOCAST,
    CLIP_WITHOUT_UNSCALE,
    UNSCALE_TWICE,
    STEP_WITHOUT_UPDATE,
    STEP_BYPASSES_SCALER,
    FP16_WITHOUT_SCALER,
    SCALER_WITH_BF16,
    DEPRECATED_AMP,
    CANCELLING_VARIANCE,
    LOW_PRECISION_REDUCTION,
    LOW_PRECISION_FUNCTION,
    ADAM_EPSILON,
    SYNC_EACH_STEP,
    DETECT_ANOMALY,
    ODD_DIMENSION,
    REINFORCEMENT_IN_BF16,
    GRADIENTS_ADD_UP,
    CLEARED_UNUSED,
    CLIPPED_AFTER_STEP,
    STEP_BEFORE_BACKWARD,
    ACTIVATION_BEFORE_LOSS,
    FIRST_BATCH,
    LEFT_IN_EVALUATION,
    STALE_OPTIMIZER,
    BYPASSED_WRAPPER,
    UNSHARDED_DATA,
    SHARED_GENERATOR,
    SCHEDULE_FIRST,
    RESUME_WITHOUT_OPTIMIZER,
    NEVER_SYNCHRONIZED,
    SWAPPED_BETAS,
    BATCH_NORM_MOMENTUM,
    REMADE_OPTIMIZER,
    ACCUMULATION_BYPASSED,
    FREEZING_WITHOUT_EFFECT,
    EVALUATED_IN_TRAINING_MODE,
    LOSSES_KEPT,
    CLIPPED_ONE_BY_ONE,
    TARGETS_ARE_INPUTS,
    PADDING_COUNTS,
    NOT_CALLED,
    REBUILT_LOSS,
    SCHEDULE_STEPPED_TWICE,
)
"""All rules, in the order of their codes."""

BY_CODE = {rule.code: rule for rule in RULES}
if [rule.code for rule in RULES] != sorted(BY_CODE):
    raise CatalogError("two rules share a code, or they are not in its order")

__all__ = ["BY_CODE", "RULES", "Rule"]
