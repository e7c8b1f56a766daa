"""The conditions catalog: all records, by what they watch."""

from collections.abc import Mapping

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions.gradient_explosion import GRADIENT_EXPLOSION
from mp_agent.alerting.conditions.gradient_vanishing import GRADIENT_VANISHING
from mp_agent.alerting.conditions.loss_nonfinite import LOSS_NONFINITE
from mp_agent.alerting.conditions.loss_scale_at_floor import LOSS_SCALE_AT_FLOOR
from mp_agent.alerting.conditions.loss_scale_low_and_falling import LOSS_SCALE_LOW_AND_FALLING
from mp_agent.alerting.conditions.nonfinite_update import NONFINITE_UPDATE
from mp_agent.alerting.conditions.overflow_ratio_high import OVERFLOW_RATIO_HIGH
from mp_agent.alerting.conditions.run_failed import RUN_FAILED
from mp_agent.alerting.conditions.run_stalled import RUN_STALLED
from mp_agent.alerting.conditions.run_vanished import RUN_VANISHED
from mp_agent.errors import CatalogError

GROUPS: Mapping[str, tuple[Condition, ...]] = {
    "gradients": (GRADIENT_EXPLOSION, GRADIENT_VANISHING, NONFINITE_UPDATE),
    "loss": (LOSS_NONFINITE,),
    "loss-scale": (LOSS_SCALE_LOW_AND_FALLING, LOSS_SCALE_AT_FLOOR, OVERFLOW_RATIO_HIGH),
    "run": (RUN_STALLED, RUN_FAILED, RUN_VANISHED),
}
"""Rule group to its conditions, in the order in which they are rendered."""

CONDITIONS: tuple[Condition, ...] = tuple(
    condition for conditions in GROUPS.values() for condition in conditions
)
if len({condition.name for condition in CONDITIONS}) != len(CONDITIONS):
    raise CatalogError("two conditions share a name")

__all__ = ["CONDITIONS", "GROUPS", "Condition"]
