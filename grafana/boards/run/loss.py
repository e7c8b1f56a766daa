"""The third row of Run: loss and loss scale."""

from grafana.panel import Panel, Query, Row, above, help_of
from grafana.queries import aggregated, by_run, increase, series, share_of_steps, while_finite
from grafana.style import LOSS_IS_LINEAR_TO, LOSS_SCALE_LINES, SKIPPED
from mp_agent.alerting.conditions.batches import (
    RANKS_SHARE_BATCHES,
    SAME_BATCH,
    SINGLE_ROW_BATCH,
)
from mp_agent.alerting.conditions.loss import LOSS_DIVERGING, LOSS_SPIKE
from mp_agent.alerting.conditions.loss_scale import (
    LOSS_SCALE_AT_FLOOR,
    LOSS_SCALE_CONSECUTIVE_DECREASES,
    LOSS_SCALE_FAR_BELOW_INITIAL,
    LOSS_SCALE_LOW,
    LOSS_SCALE_LOW_AND_FALLING,
)
from mp_agent.alerting.conditions.mixed_precision import OVERFLOW_RATIO_HIGH
from mp_agent.alerting.conditions.nonfinite import LOSS_NONFINITE

_NO_SCALER = "No loss scale"
_OVER_RANGE = f"({series('mp_agent_loss')}[$__range] @ end())"
_SPANS_DECADES = (
    aggregated(f"max_over_time{_OVER_RANGE}", "max")
    + " > 100 * "
    + aggregated(f"min_over_time{_OVER_RANGE} > 0", "min")
)

LOSS = Row(
    title="Loss and loss scale",
    panels=(
        Panel(
            id=20,
            title="Loss",
            description="Sum over the backward passes of a step, averaged over ranks. It should "
            "fall or be constant; a spike that recovers is a bad batch, one that persists is a "
            "lost run. Two steps above the spike limit are a spike. Best is the lowest level so "
            "far, which does not follow a rising loss. The axis is logarithmic if the loss "
            "spans more than two decades, so that an explosion leaves the rest readable. The "
            "curve ends where the loss is NaN or Inf.",
            width=12,
            log_when=_SPANS_DECADES,
            log_around_zero=LOSS_IS_LINEAR_TO,
            queries=(
                Query(while_finite(by_run("mp_agent_loss"), "loss"), "loss"),
                Query(by_run("mp_agent_loss_median"), "median", optional=True),
                Query(by_run("mp_agent_loss_spike_bound"), "spike limit", optional=True),
                Query(by_run("mp_agent_loss_best"), "best", optional=True),
            ),
            runbooks=(LOSS_SPIKE, LOSS_NONFINITE),
        ),
        Panel(
            id=21,
            title="Loss scale",
            description="GradScaler's scale, log2: it doubles every 2000 steps without overflow "
            "and halves on an overflow, so a sawtooth is healthy. A fall towards the dashed "
            "lines is not: <loss_scale_very_low>, <loss_scale_low> and the floor, "
            "<loss_scale_floor>.",
            width=12,
            unit="none",
            log_base=2,
            minimum=0.5,
            nothing=_NO_SCALER,
            lines=True,
            steps=LOSS_SCALE_LINES,
            queries=(
                Query(by_run("mp_agent_loss_scale", "min"), "scale", optional=True),
                Query(by_run("mp_agent_loss_scale_initial"), "at the start", optional=True),
                Query(by_run("mp_agent_loss_scale_calibrated"), "calibrated", optional=True),
            ),
            runbooks=(
                LOSS_SCALE_LOW,
                LOSS_SCALE_LOW_AND_FALLING,
                LOSS_SCALE_FAR_BELOW_INITIAL,
                LOSS_SCALE_AT_FLOOR,
            ),
        ),
        Panel(
            id=22,
            title="Skipped steps and overflow ratio",
            description="Skipped per attempted step; each skip is an overflow. Dashed: limits "
            "of the alerts.",
            width=8,
            unit="percentunit",
            minimum=0,
            soft_maximum=0.12,
            lines=True,
            steps=SKIPPED,
            queries=(Query(share_of_steps("mp_agent_skipped_steps_total"), "overflow ratio"),),
            runbooks=(OVERFLOW_RATIO_HIGH,),
        ),
        Panel(
            id=23,
            title="Loss scale changes",
            description="Number of decreases and increases of the scale. More decreases than "
            "increases over minutes precede a collapse.",
            width=8,
            minimum=0,
            soft_maximum=1,
            colors={"down": "red", "up": "green"},
            queries=(
                Query(increase("mp_agent_loss_scale_decreases_total"), "down"),
                Query(increase("mp_agent_loss_scale_increases_total"), "up"),
                Query(increase("mp_agent_loss_scale_floor_skips_total"), "skipped at the floor"),
                Query(increase("mp_agent_loss_scale_floor_stalls_total"), "stalled at the floor"),
            ),
        ),
        Panel(
            id=25,
            title="Loss scale lowered in a row",
            description=help_of("mp_agent_loss_scale_consecutive_decreases")
            + " Dashed: limit of the alert.",
            width=8,
            minimum=0,
            soft_maximum=10,
            decimals=0,
            nothing=_NO_SCALER,
            lines=True,
            steps=above(loss_scale_decreases_in_row="orange"),
            queries=(
                Query(
                    by_run("mp_agent_loss_scale_consecutive_decreases"),
                    "consecutive",
                    optional=True,
                ),
            ),
            runbooks=(LOSS_SCALE_CONSECUTIVE_DECREASES,),
        ),
        Panel(
            id=26,
            title="Loss trend",
            description=help_of("mp_agent_loss_trend") + " Dashed: limit for divergence.",
            width=8,
            decimals=1,
            nothing="Not enough steps yet",
            lines=True,
            steps=above(loss_trend_deviations="orange"),
            queries=(Query(by_run("mp_agent_loss_trend"), "trend", optional=True),),
            runbooks=(LOSS_DIVERGING,),
        ),
        Panel(
            id=27,
            title="Loss deviation",
            description=help_of("mp_agent_loss_deviation")
            + " It is the unit of the spike limit and of the trend; a growing deviation means "
            "that the loss becomes noisier.",
            width=8,
            minimum=0,
            nothing="Not enough steps yet",
            queries=(Query(by_run("mp_agent_loss_deviation"), "deviation", optional=True),),
        ),
        Panel(
            id=24,
            title="Learning rate",
            description=help_of("mp_agent_learning_rate"),
            width=8,
            minimum=0,
            queries=(Query(by_run("mp_agent_learning_rate"), "learning rate"),),
        ),
        Panel(
            id=28,
            title="Odd losses",
            description="Steps whose loss was a spike, or NaN or Inf: skipped ones from the "
            "third consecutive one on, and applied ones, which are worse.",
            width=12,
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_loss_spike_steps_total"), "spikes"),
                Query(increase("mp_agent_loss_nonfinite_repeated_steps_total"), "not finite"),
                Query(increase("mp_agent_loss_nonfinite_unskipped_steps_total"), "and applied"),
            ),
            runbooks=(LOSS_NONFINITE, LOSS_SPIKE),
        ),
        Panel(
            id=29,
            title="Batches that repeat",
            description="Steps since the model has got one and the same batch, or ranks that "
            "average their gradients the same ones, at every look; ranks whose batches have a "
            "single row. All are 0 in a healthy run.",
            width=12,
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(by_run("mp_agent_batch_repeated_steps"), "same batch"),
                Query(by_run("mp_agent_batch_shared_steps"), "same on ranks"),
                Query(by_run("mp_agent_batch_single_row_ranks"), "ranks with single rows"),
            ),
            runbooks=(SAME_BATCH, RANKS_SHARE_BATCHES, SINGLE_ROW_BATCH),
        ),
    ),
)
