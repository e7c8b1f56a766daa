"""Run scope: GradScaler's loss scale and the steps it skips. Absent without a scaler."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition


def _change_sign(change: StepTransition) -> int:
    now = change.step.loss_scale
    before = None if change.previous is None else change.previous.loss_scale
    if now is None or before is None:
        return 0
    return (now > before) - (now < before)


def _floor_skip(change: StepTransition) -> Reading:
    scale = change.step.loss_scale
    floor = change.thresholds["loss_scale_floor"]
    return float(change.step.skipped and scale is not None and scale <= floor)


def _floor_stall(change: StepTransition) -> Reading:
    return float(change.recent_floor_skips >= change.thresholds["floor_skips"])


LOSS_SCALE_METRICS = (
    Metric(
        name="mp_agent.loss_scale",
        unit="{scale}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="GradScaler's loss scale during the last step.",
        read=lambda run: run.loss_scale,
    ),
    Metric(
        name="mp_agent.loss_scale.initial",
        unit="{scale}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Loss scale of the first observed step.",
        read=lambda run: run.loss_scale_initial,
    ),
    Metric(
        name="mp_agent.loss_scale.calibrated",
        unit="{scale}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("calibration_steps",),
        help="Loss scale at the end of this attempt's calibration; absent in its first 500 steps.",
        read=lambda run: run.loss_scale_calibrated,
    ),
    Metric(
        name="mp_agent.loss_scale.increases",
        unit="{change}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Steps on which the loss scale was higher than on the step before.",
        count=lambda change: float(_change_sign(change) > 0),
    ),
    Metric(
        name="mp_agent.loss_scale.decreases",
        unit="{change}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Steps on which the loss scale was lower than on the step before.",
        count=lambda change: float(_change_sign(change) < 0),
    ),
    Metric(
        name="mp_agent.loss_scale.consecutive_decreases",
        unit="{change}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Downward changes of the loss scale since its last upward change.",
        read=lambda run: (
            None if run.loss_scale is None else float(run.loss_scale_consecutive_decreases)
        ),
    ),
    Metric(
        name="mp_agent.loss_scale.floor.skips",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        thresholds=("loss_scale_floor",),
        help="Steps skipped although the loss scale was already at or below 1.",
        count=_floor_skip,
    ),
    Metric(
        name="mp_agent.loss_scale.floor.stalls",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        thresholds=("loss_scale_floor", "floor_skips", "floor_skip_steps"),
        help="Such steps that were at least the third within 100 steps: training has stalled.",
        count=_floor_stall,
    ),
    Metric(
        name="mp_agent.skipped.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Steps that GradScaler skipped.",
        count=lambda change: float(change.step.skipped),
    ),
)
