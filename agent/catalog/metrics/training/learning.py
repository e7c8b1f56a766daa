"""Run scope: whether steps can have taught the model anything."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import RunView


def _untrained(run: RunView) -> Reading:
    return {(reason,): float(steps) for reason, steps in run.health.untrained.items()}


def _repeated(change: StepTransition) -> Reading:
    """Leave out those on which the weights were updated: `nonfinite.updates` counts them."""
    repeated = change.nonfinite_gradient_steps >= change.thresholds["nonfinite_gradients"]
    return float(change.step.weights_kept and repeated)


LEARNING_METRICS = (
    Metric(
        name="mp_agent.untrained.steps",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("reason",),
        help="Consecutive steps in which the model cannot have learned anything: `all gradients "
        "0`, `no gradients`, `learning rate 0`, `loss 0 with non-finite gradients`, `loss 0` "
        "(after losses above 0 from the first on), `constant loss` (within 0.01 %), `constant loss "
        "and gradient norm`. Absent where a falling loss shows otherwise.",
        read=_untrained,
    ),
    Metric(
        name="mp_agent.grad.nonfinite.repeated.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        thresholds=("nonfinite_gradients",),
        help="Skipped steps with non-finite gradients, from the third consecutive one on; "
        "excluding those on which a scaler lowers its scale.",
        count=_repeated,
    ),
    Metric(
        name="mp_agent.grad.nonfinite.replaced.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Updates made with finite gradients in place of NaN or Inf that backward had made, as "
        "`nan_to_num_` does. Counted on every step with measure_local_gradients, else on some "
        "steps, and by a few elements.",
        count=lambda change: float(change.step.gradients_replaced),
    ),
    Metric(
        name="mp_agent.learning_rate.jumps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        thresholds=("learning_rate_jump",),
        help="Steps whose learning rate was ten times the previous maximum, after the first 100 "
        "steps; the first change within 1000 steps counts only if the loss or norms leave their "
        "usual range.",
        count=lambda change: float(change.rate_jumped),
        evidence_step=lambda change: change.rate_jump_step,
    ),
)
