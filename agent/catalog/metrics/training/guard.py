"""Run scope: what the guard has done."""

from collections.abc import Mapping

from mp_agent.catalog.guard import DRY_RUN, Action
from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition

_DONE, _DRY_RUN = "done", "dry_run"


def _actions(change: StepTransition) -> Reading:
    found: dict[tuple[str, ...], float | None] = {}
    for action in Action:
        if (value := change.step.columns.get(action.column, 0.0)) > 0.0:
            found[action.value, _DRY_RUN if value == DRY_RUN else _DONE] = 1.0
    return found


def _all_labels(thresholds: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    return tuple((action.value, mode) for action in Action for mode in (_DONE, _DRY_RUN))


GUARD_METRICS = (
    Metric(
        name="mp_agent.guard.actions",
        unit="{action}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("action", "mode"),
        help="Steps on which the guard acted: `skip_update`, `clip_gradients`, "
        "`lower_learning_rate`, `raise_loss_scale`, `widen_precision`, `request_checkpoint`, "
        "`request_stop`; or, as `none_left`, was to and had acted too often. Mode: `done`, or "
        "`dry_run` where it would have been.",
        count=_actions,
        label_values=_all_labels,
    ),
)
