"""Metrics of loss, loss scale, learning rate and guard.

Run scope: the loss against its own usual level, its trend, and steps with a non-finite loss.
Only losses that count enter level and trend: finite on all ranks that delivered, of steps that were
not skipped, and of at least half as many ranks as before.
"""

from mp_agent.catalog.guard import DRY_RUN, Action
from mp_agent.catalog.metric import Reading, counter, gauge
from mp_agent.catalog.thresholds import level_label
from mp_agent.records.merged import StepTransition


def _unskipped(change: StepTransition) -> Reading:
    return float(change.step.flag("loss_nonfinite") and not change.step.weights_kept)


def _repeated_nonfinite_losses(change: StepTransition) -> Reading:
    return float(change.nonfinite_loss_skips >= change.thresholds["nonfinite_losses"])


LOSS_MEDIAN = gauge(
    "mp_agent.loss.median",
    "{loss}",
    help="Median of the last 256 losses; absent before the 64th.",
    read=lambda run: run.loss.median,
)
LOSS_SPIKE_STEPS = counter(
    "mp_agent.loss.spike.steps",
    "{step}",
    thresholds=(
        "loss_spike_deviations",
        "loss_spike_noisy_deviations",
        "loss_deviation_floor",
    ),
    help="Steps whose loss was above the spike bound, as was one of the two previous "
    "losses, or both if losses are noisy; a single unusual batch is not a spike.",
    count=lambda change: float(change.loss_spiking),
)
LOSS_TREND = gauge(
    "mp_agent.loss.trend",
    "{deviation}",
    thresholds=("loss_deviation_floor",),
    help="Difference between the median of the last 512 losses and that of the 512 before, "
    "in median absolute deviations of the latter (of medians of 16 losses); negative while "
    "the loss falls.",
    read=lambda run: run.loss.trend,
)
LOSS_FALL = gauge(
    "mp_agent.loss.fall",
    "{deviation}",
    help="Mean of the earlier half of the last 256 losses less that of the later half, in standard "
    "deviations of the latter; above 1 the loss falls by more than it jumps about. Absent before "
    "the 256th, and while the loss is constant.",
    read=lambda run: run.loss.fall,
)
LOSS_SOLVED = gauge(
    "mp_agent.loss.solved",
    "",
    thresholds=("loss_solved",),
    help="1 while the loss is at its best level, and that is next to nothing of the first one: the "
    "task is solved, or the data are memorized, and gradients are small for that reason; else 0.",
    read=lambda run: float(run.loss.solved),
)
LOSS_RISING_STEPS = gauge(
    "mp_agent.loss.rising.steps",
    "{step}",
    thresholds=("loss_trend_deviations", "loss_deviation_floor"),
    help="Consecutive losses for which mp_agent_loss_trend was above loss_trend_deviations; none "
    "where the loss moves from step to step by a tenth of its level or more.",
    read=lambda run: float(run.loss.rising_steps),
)
LOSS_LOST_STEPS = gauge(
    "mp_agent.loss.lost.steps",
    "{step}",
    thresholds=("loss_deviation_floor", "loss_lost_steps", "loss_growth"),
    help="Losses since the run lost what it had learned, after an explosion, by climbing to "
    "loss_growth times its best level or by rising slowly to its initial level; 0 before that, "
    "and after a recovery. Where the loss is clearly above that multiple and does not fall, it "
    "takes three eighths of loss_lost_steps. Absent where the loss has gone up and down by "
    "factors since the run began, as a sum over episodes does: it has no level to lose.",
    read=lambda run: None if run.loss.lost_steps is None else float(run.loss.lost_steps),
)
LOSS_NONFINITE_UNSKIPPED = counter(
    "mp_agent.loss.nonfinite.unskipped.steps",
    "{step}",
    help="Steps that were not skipped although the loss of a rank was NaN or Inf.",
    count=_unskipped,
)
LOSS_NONFINITE_REPEATED = counter(
    "mp_agent.loss.nonfinite.repeated.steps",
    "{step}",
    thresholds=("nonfinite_losses",),
    help="Skipped steps whose loss was NaN or Inf, from the third consecutive one on.",
    count=_repeated_nonfinite_losses,
)

LOSS_RELAPSED_STEPS = gauge(
    "mp_agent.loss.relapsed.steps",
    "{step}",
    thresholds=("loss_growth",),
    help="Steps for which the loss has been back at its initial level, within a few steps, after "
    "it had fallen to half of it or less; 0 before that is sure, and after a recovery.",
    read=lambda run: float(run.relapsed_steps),
)

LOSS_METRICS = (
    LOSS_MEDIAN,
    gauge(
        "mp_agent.loss.deviation",
        "{loss}",
        help="Median absolute deviation of the last 256 losses from their median.",
        read=lambda run: run.loss.deviation,
    ),
    gauge(
        "mp_agent.loss.spike.bound",
        "{loss}",
        help="Loss above which a step counts as unusual: the median plus a number of "
        "deviations, which is larger for noisy losses.",
        read=lambda run: run.loss.spike_bound,
    ),
    LOSS_SPIKE_STEPS,
    LOSS_TREND,
    LOSS_FALL,
    LOSS_SOLVED,
    LOSS_RISING_STEPS,
    gauge(
        "mp_agent.loss.best",
        "{loss}",
        help="Lowest median of 64 losses so far; it does not follow a rising loss.",
        read=lambda run: run.loss.best,
    ),
    LOSS_LOST_STEPS,
    LOSS_RELAPSED_STEPS,
    LOSS_NONFINITE_UNSKIPPED,
    LOSS_NONFINITE_REPEATED,
)


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


LOSS_SCALE = gauge(
    "mp_agent.loss_scale",
    "{scale}",
    help="GradScaler's loss scale during the last step.",
    read=lambda run: run.loss_scale.last,
)
LOSS_SCALE_INITIAL = gauge(
    "mp_agent.loss_scale.initial",
    "{scale}",
    help="Loss scale of the first observed step.",
    read=lambda run: run.loss_scale.initial,
)
LOSS_SCALE_CALIBRATED = gauge(
    "mp_agent.loss_scale.calibrated",
    "{scale}",
    thresholds=("calibration_steps",),
    help="Loss scale at the end of this attempt's calibration; absent in its first 500 steps.",
    read=lambda run: run.loss_scale.calibrated,
)
LOSS_SCALE_INCREASES = counter(
    "mp_agent.loss_scale.increases",
    "{change}",
    help="Steps on which the loss scale was higher than on the step before.",
    count=lambda change: float(_change_sign(change) > 0),
)
LOSS_SCALE_DECREASES = counter(
    "mp_agent.loss_scale.decreases",
    "{change}",
    help="Steps on which the loss scale was lower than on the step before.",
    count=lambda change: float(_change_sign(change) < 0),
)
LOSS_SCALE_CONSECUTIVE_DECREASES = gauge(
    "mp_agent.loss_scale.consecutive_decreases",
    "{change}",
    help="Downward changes of the loss scale since its last upward change.",
    read=lambda run: (
        None if run.loss_scale.last is None else float(run.loss_scale.consecutive_decreases)
    ),
)
LOSS_SCALE_LOWERED_AGAIN = counter(
    "mp_agent.loss_scale.repeated.decreases",
    "{change}",
    thresholds=("loss_scale_decreases_in_row", "loss_scale_change_steps", "calibration_steps"),
    help="Decreases of the loss scale from the fifth consecutive one within 600 steps on, after "
    "calibration.",
    count=lambda change: float(change.scale_lowered_again),
)
LOSS_SCALE_LOW_STEPS = gauge(
    "mp_agent.loss_scale.low.steps",
    "{step}",
    labels=("limit",),
    thresholds=(
        "loss_scale_reduced",
        "loss_scale_very_low",
        "loss_scale_low",
        "loss_scale_net_decreases",
        "loss_scale_change_steps",
        "loss_scale_fall_steps",
        "loss_scale_share_of_initial",
        "loss_scale_share_of_calibrated",
        "calibration_steps",
    ),
    help="Consecutive steps, after calibration, with a loss scale that is below the threshold "
    "named by `limit` and was not at first: for loss_scale_low one that is still falling, for "
    "loss_scale_share_of_initial one that has fallen since calibration.",
    read=lambda run: {(name,): float(steps) for name, steps in run.loss_scale.low_steps.items()},
)
LOSS_SCALE_FLOOR_STALLS = counter(
    "mp_agent.loss_scale.floor.stalls",
    "{step}",
    thresholds=("loss_scale_floor", "floor_skips", "floor_skip_steps"),
    help="Steps skipped at a loss scale of at most 1, from the third within 100 steps on: "
    "training has stalled.",
    count=_floor_stall,
)
_OVERFLOW_BOUNDS = ("overflow_warning", "overflow_critical", "overflow_rising")


def _excess(change: StepTransition) -> Reading:
    return {(level_label(name),): 1.0 for name in change.overflow_bounds}


SKIPPED_EXCESS = counter(
    "mp_agent.skipped.excess.steps",
    "{step}",
    labels=("bound",),
    label_values=lambda thresholds: tuple((level_label(name),) for name in _OVERFLOW_BOUNDS),
    thresholds=(
        *_OVERFLOW_BOUNDS,
        "overflow_skips",
        "overflow_steps",
        "overflow_share_steps",
        "overflow_rise_steps",
        "calibration_steps",
    ),
    help="Steps that GradScaler skipped after calibration, or in a row without lowering its scale, "
    "as one of so many in the last 1000 steps that their share was above the bound, by the bound's "
    "level.",
    count=_excess,
)
SKIPPED_STEPS = counter(
    "mp_agent.skipped.steps",
    "{step}",
    help="Steps that GradScaler skipped.",
    count=lambda change: float(change.step.skipped),
)

LOSS_SCALE_METRICS = (
    LOSS_SCALE,
    LOSS_SCALE_INITIAL,
    LOSS_SCALE_CALIBRATED,
    LOSS_SCALE_INCREASES,
    LOSS_SCALE_DECREASES,
    LOSS_SCALE_CONSECUTIVE_DECREASES,
    LOSS_SCALE_LOWERED_AGAIN,
    LOSS_SCALE_LOW_STEPS,
    counter(
        "mp_agent.loss_scale.floor.skips",
        "{step}",
        thresholds=("loss_scale_floor",),
        help="Steps skipped although the loss scale was already at or below 1.",
        count=_floor_skip,
    ),
    LOSS_SCALE_FLOOR_STALLS,
    SKIPPED_EXCESS,
    SKIPPED_STEPS,
)


def _repeated_nonfinite_gradients(change: StepTransition) -> Reading:
    """Leave out those on which the weights were updated: `nonfinite.updates` counts them."""
    repeated = change.nonfinite_gradient_steps >= change.thresholds["nonfinite_gradients"]
    return float(change.step.weights_kept and repeated)


UNTRAINED_STEPS = gauge(
    "mp_agent.untrained.steps",
    "{step}",
    labels=("reason",),
    help="Consecutive steps in which the model cannot have learned: `all gradients "
    "0`, `no gradients`, `learning rate 0` (of the first group), `all learning rates "
    "0`, `loss 0 with non-finite gradients`, `loss 0` (after losses above 0), `loss 0 at once`, "
    "`constant loss` (within 0.01 %), `constant loss and gradient norm`, `gradients clipped to "
    "almost 0`. Absent where a falling loss shows otherwise.",
    read=lambda run: {(reason,): float(steps) for reason, steps in run.learning.untrained.items()},
)
GRAD_NONFINITE_REPEATED = counter(
    "mp_agent.grad.nonfinite.repeated.steps",
    "{step}",
    thresholds=("nonfinite_gradients",),
    help="Skipped steps with non-finite gradients, from the third consecutive one on; "
    "excluding those on which a scaler lowers its scale.",
    count=_repeated_nonfinite_gradients,
)
GRAD_NONFINITE_REPLACED = counter(
    "mp_agent.grad.nonfinite.replaced.steps",
    "{step}",
    help="Updates made with finite gradients in place of NaN or Inf that backward had made, as "
    "`nan_to_num_` does. Counted on every step with measure_local_gradients, else on some "
    "steps, and by a few elements.",
    count=lambda change: float(change.step.gradients_replaced),
)
LEARNING_RATE_JUMPS = counter(
    "mp_agent.learning_rate.jumps",
    "{step}",
    thresholds=("learning_rate_jump",),
    help="Steps whose learning rate was ten times the previous maximum, after the first 100 "
    "steps; the first change within 1000 steps counts only if the loss or norms leave their "
    "usual range.",
    count=lambda change: float(change.rate_jumped),
    evidence_step=lambda change: change.rate_jump_step,
)
LEARNING_RATE_FALLS = counter(
    "mp_agent.learning_rate.falls",
    "{fall}",
    thresholds=("learning_rate_fall",),
    help="Falls of the learning rate, within 64 steps, to less than learning_rate_fall of what it "
    "was, where it stayed above 0 for 16 steps. A fall to a 20th or less within one step begins "
    "another schedule.",
    count=lambda change: float(change.rate_fell),
    evidence_step=lambda change: change.rate_fall_step,
)
LOOP_MISTAKE_STEPS = gauge(
    "mp_agent.loop.mistake.steps",
    "{step}",
    labels=("mistake",),
    help="Consecutive steps, not skipped by the scaler, on which the loop made a mistake, which "
    "has an alert: `gradients add up`, `gradients discarded`, `clipping after the step`, `step "
    "repeated`, `scaled gradients`, `accumulation bypassed`, `optimizer never steps` (64 if the "
    "run makes no step), `evaluation mode`, `clipping without gradients`, `clipping one by one`, "
    "`clipping by shard`, `epoch repeated`, `seed repeated`, `batch norm momentum`, `betas "
    "swapped`, `evaluation in training mode`; by a look on every 17th step `FP16 without a loss "
    "scale`, `loss input mismatch`, `targets broadcast`, `loss in 16 bits`, `targets misaligned`, "
    "`padding in targets`, `targets seen`.",
    read=lambda run: {(mistake,): float(steps) for mistake, steps in run.loop.steps.items()},
)
AUTOCAST_FP32_SAMPLES = gauge(
    "mp_agent.autocast.fp32.samples",
    "{sample}",
    thresholds=("autocast_fp32_share",),
    help="Consecutive samples in which mp_agent_autocast_fp32_ratio was above its limit.",
    read=lambda run: None if run.loop.fp32_share is None else float(run.loop.fp32_samples),
)
AUTOCAST_FP32_SHARE = gauge(
    "mp_agent.autocast.fp32",
    "1",
    help="Share of FP32 among the results of linear layers and convolutions on a step on which "
    "autocast to 16 bits was on: on every 17th, and where a graph of the loss shows them.",
    read=lambda run: run.loop.fp32_share,
)

LEARNING_METRICS = (
    UNTRAINED_STEPS,
    LOOP_MISTAKE_STEPS,
    gauge(
        "mp_agent.loop.discarded_backwards",
        "{backward}",
        help="Backwards before the last step whose gradients were cleared before any step had "
        "used them, where the loop is not known to do so on purpose; absent without any.",
        read=lambda run: run.loop.discarded,
    ),
    AUTOCAST_FP32_SAMPLES,
    AUTOCAST_FP32_SHARE,
    GRAD_NONFINITE_REPEATED,
    GRAD_NONFINITE_REPLACED,
    LEARNING_RATE_JUMPS,
    LEARNING_RATE_FALLS,
)


_DONE, _DRY_RUN = "done", "dry_run"


def _actions(change: StepTransition) -> Reading:
    found: dict[tuple[str, ...], float | None] = {}
    for action in Action:
        if (value := change.step.columns.get(action.column)) is not None:
            found[action.value, _DONE] = float(value > DRY_RUN)
            found[action.value, _DRY_RUN] = float(value == DRY_RUN)
    return found


GUARD_METRICS = (
    counter(
        "mp_agent.guard.actions",
        "{action}",
        labels=("action", "mode"),
        help="Steps on which the guard acted: `skip_update`, `clip_gradients`, "
        "`hold_learning_rate`, `lower_learning_rate`, `raise_loss_scale`, `reset_loss_scale`, "
        "`widen_precision`, `request_checkpoint`, `request_stop`; or, as `none_left`, was to and "
        "had acted too often. "
        "Mode: `done`, or `dry_run` where it would have been. Only of runs with a guard, and of "
        "its policies.",
        count=_actions,
        appears_when_counted=True,
    ),
)
