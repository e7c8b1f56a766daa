"""Run scope: what the guard has done."""

from mp_agent.catalog.guard import DRY_RUN, Action
from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition

_DONE, _DRY_RUN = "done", "dry_run"


def _actions(change: StepTransition) -> Reading:
    found: dict[tuple[str, ...], float | None] = {}
    for action in Action:
        if (value := change.step.columns.get(action.column)) is not None:
            found[action.value, _DONE] = float(value > DRY_RUN)
            found[action.value, _DRY_RUN] = float(value == DRY_RUN)
    return found


GUARD_METRICS = (
    Metric(
        name="mp_agent.guard.actions",
        unit="{action}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("action", "mode"),
        help="Steps on which the guard acted: `skip_update`, `clip_gradients`, "
        "`lower_learning_rate`, `raise_loss_scale`, `reset_loss_scale`, `widen_precision`, "
        "`request_checkpoint`, `request_stop`; or, as `none_left`, was to and had acted too often. "
        "Mode: `done`, or `dry_run` where it would have been. Only of runs with a guard, and of "
        "its policies.",
        count=_actions,
        appears_when_counted=True,
    ),
)
