"""Run scope: the loss against its own usual level, its trend, and steps with a non-finite loss.

Only losses that count enter level and trend: finite on all ranks that delivered, of steps that were
not skipped, and of at least half as many ranks as before.
"""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import RunView


def _median(run: RunView) -> Reading:
    return None if run.health.loss is None else run.health.loss.median


def _deviation(run: RunView) -> Reading:
    return None if run.health.loss is None else run.health.loss.deviation


def _spike_bound(run: RunView) -> Reading:
    return None if run.health.loss is None else run.health.loss.spike_bound


def _best(run: RunView) -> Reading:
    return None if run.health.loss_standing is None else run.health.loss_standing.best


def _lost_steps(run: RunView) -> Reading:
    standing = run.health.loss_standing
    return None if standing is None else float(standing.lost_steps)


def _unskipped(change: StepTransition) -> Reading:
    return float(change.step.flag("loss_nonfinite") and not change.step.weights_kept)


def _repeated(change: StepTransition) -> Reading:
    return float(change.nonfinite_loss_skips >= change.thresholds["nonfinite_losses"])


LOSS_METRICS = (
    Metric(
        name="mp_agent.loss.median",
        unit="{loss}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Median of the last 256 losses; absent before the 64th.",
        read=_median,
    ),
    Metric(
        name="mp_agent.loss.deviation",
        unit="{loss}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Median absolute deviation of the same losses from their median.",
        read=_deviation,
    ),
    Metric(
        name="mp_agent.loss.spike.bound",
        unit="{loss}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Loss above which a step counts as unusual: the median plus a number of "
        "deviations, which is larger for noisy losses.",
        read=_spike_bound,
    ),
    Metric(
        name="mp_agent.loss.spike.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        thresholds=(
            "loss_spike_deviations",
            "loss_spike_noisy_deviations",
            "loss_deviation_floor",
        ),
        help="Steps whose loss was above the spike bound, as was one of the two previous "
        "losses, or both if losses are noisy; a single unusual batch is not a spike.",
        count=lambda change: float(change.loss_spiking),
    ),
    Metric(
        name="mp_agent.loss.trend",
        unit="{deviation}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("loss_deviation_floor",),
        help="Difference between the median of the last 512 losses and that of the 512 before, "
        "in median absolute deviations of the latter (of medians of 16 losses); negative while "
        "the loss falls.",
        read=lambda run: run.health.loss_trend,
    ),
    Metric(
        name="mp_agent.loss.rising.steps",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("loss_trend_deviations", "loss_deviation_floor"),
        help="Consecutive losses for which mp_agent_loss_trend was above loss_trend_deviations.",
        read=lambda run: float(run.health.loss_rising_steps),
    ),
    Metric(
        name="mp_agent.loss.best",
        unit="{loss}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Lowest median of 64 losses so far; it does not follow a rising loss.",
        read=_best,
    ),
    Metric(
        name="mp_agent.loss.lost.steps",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("loss_deviation_floor", "loss_lost_steps", "loss_growth"),
        help="Losses since the run lost what it had learned, after an explosion, by climbing to "
        "loss_growth times its best level or by rising slowly to its initial level; 0 before that, "
        "and after a recovery.",
        read=_lost_steps,
    ),
    Metric(
        name="mp_agent.loss.nonfinite.unskipped.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        help="Steps that were not skipped although the loss of a rank was NaN or Inf.",
        count=_unskipped,
    ),
    Metric(
        name="mp_agent.loss.nonfinite.repeated.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        thresholds=("nonfinite_losses",),
        help="Skipped steps whose loss was NaN or Inf, from the third consecutive one on.",
        count=_repeated,
    ),
)
