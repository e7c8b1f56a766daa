"""A measured plan, for reports."""

from mp_agent.plan.evaluation.api import measure_plan
from mp_agent.plan.evaluation.model import PlanEvaluation
from mp_agent.plan.precision_plan import PrecisionPlan
from tests.agent.plan.recommendation.models import odd_network


def overflowing_evaluation() -> PlanEvaluation:
    """Return the evaluation of FP16 whose first steps overflow under a loss scale of 2^40."""
    plan = PrecisionPlan(
        precision="fp16-autocast", device="cpu", loss_scale=2.0**40, keep_fp32=("(loss)",)
    )
    return measure_plan(*odd_network(), plan, steps=12, warmup_steps=2, learning_rate=1e-2)
