"""All rules, by what they are about; one module per rule."""

from mp_agent.errors import CatalogError
from mp_agent.lint.rule import Rule
from mp_agent.lint.rules.autocast.backward_under_autocast import BACKWARD_UNDER_AUTOCAST
from mp_agent.lint.rules.autocast.binary_cross_entropy import BINARY_CROSS_ENTROPY
from mp_agent.lint.rules.autocast.deprecated_amp import DEPRECATED_AMP
from mp_agent.lint.rules.autocast.loss_outside_autocast import LOSS_OUTSIDE_AUTOCAST
from mp_agent.lint.rules.casts.cast_input import CAST_INPUT
from mp_agent.lint.rules.casts.cast_model import CAST_MODEL
from mp_agent.lint.rules.cost.detect_anomaly import DETECT_ANOMALY
from mp_agent.lint.rules.cost.odd_dimension import ODD_DIMENSION
from mp_agent.lint.rules.cost.sync_each_step import SYNC_EACH_STEP
from mp_agent.lint.rules.numerics.adam_epsilon import ADAM_EPSILON
from mp_agent.lint.rules.numerics.cancelling_variance import CANCELLING_VARIANCE
from mp_agent.lint.rules.numerics.low_precision_function import LOW_PRECISION_FUNCTION
from mp_agent.lint.rules.numerics.low_precision_reduction import LOW_PRECISION_REDUCTION
from mp_agent.lint.rules.scaling.clip_without_unscale import CLIP_WITHOUT_UNSCALE
from mp_agent.lint.rules.scaling.fp16_without_scaler import FP16_WITHOUT_SCALER
from mp_agent.lint.rules.scaling.scaler_with_bf16 import SCALER_WITH_BF16
from mp_agent.lint.rules.scaling.step_bypasses_scaler import STEP_BYPASSES_SCALER
from mp_agent.lint.rules.scaling.step_without_update import STEP_WITHOUT_UPDATE
from mp_agent.lint.rules.scaling.unscale_twice import UNSCALE_TWICE

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
)
"""In the order of their codes."""

BY_CODE = {rule.code: rule for rule in RULES}
if [rule.code for rule in RULES] != sorted(BY_CODE):
    raise CatalogError("two rules share a code, or they are not in its order")

__all__ = ["BY_CODE", "RULES", "Rule"]
