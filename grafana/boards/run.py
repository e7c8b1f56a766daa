"""Run: the story of one run from top to bottom."""

from grafana.panel import (
    PER_SECOND,
    Board,
    Column,
    Panel,
    Query,
    Row,
    Step,
    View,
    above,
    below,
    help_of,
)
from grafana.queries import (
    SELECTED,
    aggregated,
    by_run,
    increase,
    quantile,
    rate,
    series,
    share_of_steps,
)
from grafana.style import (
    ALERT_STATE,
    ANY_IS_BAD,
    COVERAGE,
    RUN_STATE,
    conditions_by_severity,
    detected_by_severity,
)
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.thresholds import DEFAULTS

_FIRST = 'optimizer=""'
"""The optimizer that sets the step count; others carry a number."""


def _stat(
    number: int, title: str, description: str, query: Query, *, width: int = 3, **more: object
) -> Panel:
    return Panel(
        id=number,
        title=title,
        description=description,
        queries=(query,),
        view=View.STAT,
        width=width,
        height=4,
        **more,  # type: ignore[arg-type]
    )


_HEALTH = Row(
    title="Is it healthy?",
    panels=(
        _stat(
            1,
            "State",
            help_of("mp_agent_run_active"),
            Query(by_run("mp_agent_run_active")),
            texts=RUN_STATE,
        ),
        _stat(
            2,
            "Ended",
            "How the run ended; a dash while it runs.",
            Query(
                f"max by (reason) ({series('mp_agent_run_end_info')})",
                "{{reason}}",
                instant=True,
                optional=True,
            ),
            label="reason",
        ),
        _stat(
            3,
            "Step",
            help_of("mp_agent_step"),
            Query(by_run("mp_agent_step")),
            unit="none",
            decimals=0,
        ),
        _stat(4, "Loss now", help_of("mp_agent_loss"), Query(by_run("mp_agent_loss")), decimals=4),
        _stat(
            5,
            "Norm now",
            "Global norm of the unscaled gradients before clipping. Orange and red begin where "
            "the explosion alerts do.",
            Query(by_run("mp_agent_grad_norm", where=_FIRST)),
            steps=above(grad_norm_high="orange", grad_norm_extreme="red"),
        ),
        _stat(
            6,
            "Scale now",
            "GradScaler's scale; a dash without a scaler. Healthy is 32 768 to 65 536.",
            Query(by_run("mp_agent_loss_scale", "min"), optional=True),
            unit="none",
            steps=below(loss_scale_low="orange", loss_scale_floor="red"),
        ),
        _stat(
            7,
            "Skipped now",
            "Share of the attempted steps that GradScaler skipped lately.",
            Query(share_of_steps("mp_agent_skipped_steps_total")),
            unit="percentunit",
            decimals=2,
            steps=above(overflow_warning="orange", overflow_critical="red"),
        ),
        _stat(
            8,
            "Coverage",
            help_of("mp_agent_coverage_ratio"),
            Query(by_run("mp_agent_coverage_ratio", "min")),
            unit="percentunit",
            steps=COVERAGE,
        ),
    ),
)


_CONDITIONS_FIRED = by_run("mp_agent_condition_fired_total", keep=("condition", "severity"))
_CONDITIONS_SINCE = by_run("mp_agent_condition_since_step", keep=("condition", "severity"))

_CONDITIONS = Row(
    title="What is wrong",
    panels=(
        Panel(
            id=14,
            title="Conditions in force",
            description="What the node agent itself finds, step by step: red critical, orange "
            "warning, blue info. It needs no Prometheus rules and is there before the alerts are. "
            "Empty is good.",
            view=View.TIMELINE,
            width=12,
            height=7,
            minimum=0,
            texts=ALERT_STATE,
            queries=(
                Query(detected_by_severity(keep=("condition",)), "{{condition}}", optional=True),
            ),
        ),
        Panel(
            id=10,
            title="Alerts in force",
            description="Each line is an alert that fired in this time: red critical, orange "
            "warning, blue info. Empty is good.",
            view=View.TIMELINE,
            width=12,
            height=7,
            minimum=0,
            texts=ALERT_STATE,
            queries=(
                Query(conditions_by_severity(f"{SELECTED},"), "{{alertname}}", optional=True),
            ),
        ),
        Panel(
            id=15,
            title="Conditions so far",
            description="What the node agent has found in this run: how often it began, and since "
            "which step it holds where it still does. Empty is good.",
            view=View.TABLE,
            width=10,
            height=6,
            columns=(
                Column(name="condition", title="Condition"),
                Column(name="severity", title="Severity", width=90),
                Column(name="Value #A", title="Times", unit="none", width=70),
                Column(name="Value #B", title="Since step", unit="none", width=100),
            ),
            queries=(
                Query(f"{_CONDITIONS_FIRED} > 0", instant=True, optional=True),
                Query(_CONDITIONS_SINCE, instant=True, optional=True),
            ),
        ),
        Panel(
            id=11,
            title="First non-finite value",
            description=help_of("mp_agent_first_nonfinite_info") + " Empty is good.",
            view=View.TABLE,
            width=10,
            height=6,
            columns=(
                Column(name="step", title="Step", unit="none", width=80),
                Column(name="phase", title="Phase", width=90),
                Column(name="rank", title="Rank", width=70),
                Column(name="layer", title="Layer"),
            ),
            queries=(
                Query(
                    aggregated(
                        series("mp_agent_first_nonfinite_info"),
                        "max",
                        keep=("step", "rank", "layer", "phase"),
                    ),
                    instant=True,
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=12,
            title="Non-finite updates",
            description=help_of("mp_agent_nonfinite_updates_total")
            + " One is enough to lose the weights.",
            view=View.STAT,
            width=4,
            height=6,
            decimals=0,
            steps=ANY_IS_BAD,
            queries=(Query(by_run("mp_agent_nonfinite_updates_total")),),
        ),
        Panel(
            id=13,
            title="Facts",
            description=help_of("mp_agent_run_info")
            + " measuring_point says where gradients were looked at: at optimizer_step they are "
            "those after clipping.",
            view=View.TABLE,
            width=24,
            height=4,
            columns=tuple(
                Column(name=name, title=name.replace("_", " "))
                for name in ("run", *BY_PROMETHEUS_NAME["mp_agent_run_info"].labels)
            ),
            queries=(Query(series("mp_agent_run_info"), instant=True),),
        ),
    ),
)

_LOSS = Row(
    title="Loss and loss scale",
    panels=(
        Panel(
            id=20,
            title="Loss",
            description="Mean over micro-batches and ranks. It should fall or stand; a spike that "
            "comes back is a bad batch, one that stays is a lost run. Two steps above the spike "
            "limit are a spike.",
            width=12,
            queries=(
                Query(by_run("mp_agent_loss"), "loss"),
                Query(by_run("mp_agent_loss_median"), "median", optional=True),
                Query(by_run("mp_agent_loss_spike_bound"), "spike limit", optional=True),
            ),
        ),
        Panel(
            id=21,
            title="Loss scale",
            description="GradScaler's scale, log2: it doubles every 2000 clean steps and halves "
            "on an overflow, so a sawtooth is healthy. A way down to the dashed lines is not.",
            width=12,
            log_base=2,
            minimum=0.5,
            lines=True,
            steps=(
                Step(None, "red"),
                Step(DEFAULTS["loss_scale_low"], "orange"),
                Step(1024, "green"),
            ),
            queries=(
                Query(by_run("mp_agent_loss_scale", "min"), "scale", optional=True),
                Query(by_run("mp_agent_loss_scale_initial"), "at the start", optional=True),
                Query(by_run("mp_agent_loss_scale_calibrated"), "calibrated", optional=True),
            ),
        ),
        Panel(
            id=22,
            title="Skipped steps and overflow ratio",
            description="Skipped per attempted step; each skip is an overflow. Dashed: where the "
            "alerts begin.",
            width=8,
            unit="percentunit",
            minimum=0,
            lines=True,
            steps=above(overflow_warning="orange", overflow_critical="red"),
            queries=(Query(share_of_steps("mp_agent_skipped_steps_total"), "{{run}}"),),
        ),
        Panel(
            id=23,
            title="Loss scale changes",
            description="How often the scale went down and up. More downs than ups over minutes is "
            "a collapse on its way.",
            width=8,
            minimum=0,
            soft_maximum=1,
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
            + " Dashed: where the alert begins.",
            width=8,
            minimum=0,
            soft_maximum=10,
            decimals=0,
            lines=True,
            steps=above(loss_scale_decreases_in_row="orange"),
            queries=(
                Query(
                    by_run("mp_agent_loss_scale_consecutive_decreases"), "{{run}}", optional=True
                ),
            ),
        ),
        Panel(
            id=26,
            title="Loss trend",
            description=help_of("mp_agent_loss_trend") + " Dashed: where it counts as divergence.",
            width=6,
            decimals=1,
            lines=True,
            steps=above(loss_trend_deviations="orange"),
            queries=(Query(by_run("mp_agent_loss_trend"), "{{run}}", optional=True),),
        ),
        Panel(
            id=27,
            title="Loss deviation",
            description=help_of("mp_agent_loss_deviation")
            + " It is what a spike and the trend are measured in; one that grows is a loss that "
            "becomes restless.",
            width=6,
            minimum=0,
            queries=(Query(by_run("mp_agent_loss_deviation"), "{{run}}", optional=True),),
        ),
        Panel(
            id=28,
            title="Odd losses",
            description="Steps whose loss was a spike, or NaN or Inf: those that were skipped, "
            "from the third in a row on, and those that were applied, which is worse.",
            width=6,
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_loss_spike_steps_total"), "spikes"),
                Query(
                    increase("mp_agent_loss_nonfinite_repeated_steps_total"),
                    "not finite, skipped in a row",
                ),
                Query(
                    increase("mp_agent_loss_nonfinite_unskipped_steps_total"),
                    "not finite, applied",
                ),
            ),
        ),
        Panel(
            id=24,
            title="Learning rate",
            description=help_of("mp_agent_learning_rate"),
            width=6,
            queries=(Query(by_run("mp_agent_learning_rate"), "{{run}}"),),
        ),
    ),
)

_GRADIENTS = Row(
    title="Gradients",
    panels=(
        Panel(
            id=30,
            title="Gradient norm",
            description="Global norm, unscaled and before clipping, with the largest and smallest "
            "of the last two minutes, so that a single step shows at any scrape interval. Dashed: "
            "the limits of explosion (100, 1000) and vanishing (0.01, 0.001, 1e-6).",
            width=16,
            log_base=10,
            lines=True,
            steps=(
                Step(None, "red"),
                Step(DEFAULTS["grad_norm_vanished"], "orange"),
                Step(DEFAULTS["grad_norm_very_low"], "yellow"),
                Step(DEFAULTS["grad_norm_low"], "green"),
                Step(DEFAULTS["grad_norm_high"], "orange"),
                Step(DEFAULTS["grad_norm_extreme"], "red"),
            ),
            queries=(
                Query(by_run("mp_agent_grad_norm", where=_FIRST), "norm"),
                Query(by_run("mp_agent_grad_norm_window_max"), "largest in the window"),
                Query(by_run("mp_agent_grad_norm_window_min", "min"), "smallest in the window"),
                Query(by_run("mp_agent_clip_max_norm"), "clipping limit", optional=True),
            ),
        ),
        Panel(
            id=31,
            title="Clipping",
            description="Factor that clipping applied to the gradients of the last step: 1 leaves "
            "them alone. Always far below 1 means that the limit sets the step size.",
            width=8,
            minimum=0,
            maximum=1,
            queries=(
                Query(by_run("mp_agent_clip_coefficient", "min"), "coefficient", optional=True),
                Query(share_of_steps("mp_agent_clipped_steps_total"), "share of steps clipped"),
            ),
        ),
        Panel(
            id=35,
            title="Steps beyond the limits",
            description=help_of("mp_agent_grad_norm_exceeded_steps_total")
            + " Those that clipping shrank are less bad: the rest is drawn beside them.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(
                    increase("mp_agent_grad_norm_exceeded_steps_total", keep=("bound",)),
                    "norm above {{bound}}",
                ),
                Query(
                    increase("mp_agent_grad_norm_unclipped_steps_total", keep=("bound",)),
                    "above {{bound}}, not clipped",
                ),
                Query(f"1 - {by_run('mp_agent_grad_finite', 'min', where=_FIRST)}", "not finite"),
            ),
        ),
        Panel(
            id=37,
            title="Headroom to FP16's largest number",
            description=help_of("mp_agent_grad_fp16_headroom")
            + " Below 1 (dashed), the next doubling of the loss scale overflows. Far above 10, "
            "small gradients are lost to zero for nothing.",
            unit="suffix: bits",
            decimals=0,
            minimum=0,
            lines=True,
            steps=(Step(None, "red"), Step(1, "green")),
            queries=(
                Query(by_run("mp_agent_grad_fp16_headroom", "min"), "{{run}}", optional=True),
            ),
        ),
        Panel(
            id=34,
            title="Non-finite elements and steps",
            description="NaN and Inf gradient elements, and the steps that had any. With a scaler "
            "such steps are skipped; without one they destroy weights.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_grad_nonfinite_steps_total"), "steps"),
                Query(increase("mp_agent_grad_nan_elements_total"), "NaN elements"),
                Query(increase("mp_agent_grad_inf_elements_total"), "Inf elements"),
                Query(increase("mp_agent_loss_nonfinite_steps_total"), "steps with such a loss"),
            ),
        ),
        Panel(
            id=32,
            title="Largest gradient element",
            description=help_of("mp_agent_grad_abs_max"),
            log_base=10,
            queries=(Query(by_run("mp_agent_grad_abs_max", where=_FIRST), "{{run}}"),),
        ),
        Panel(
            id=33,
            title="Zero elements",
            description=help_of("mp_agent_grad_zero_ratio"),
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(Query(by_run("mp_agent_grad_zero_ratio", where=_FIRST), "{{run}}"),),
        ),
        Panel(
            id=38,
            title="Gradient norm of other optimizers",
            description="Runs with several optimizers (GANs, separate embeddings) have one norm "
            "for each; the panels above show that of the optimizer that sets the step count.",
            log_base=10,
            queries=(
                Query(
                    "topk(10, "
                    + by_run("mp_agent_grad_norm", keep=("optimizer",), where='optimizer!=""')
                    + ")",
                    "optimizer {{optimizer}}",
                    optional=True,
                ),
            ),
        ),
    ),
)

_PACE = Row(
    title="Pace",
    panels=(
        Panel(
            id=40,
            title="Step time",
            description=help_of("mp_agent_step_duration_seconds"),
            width=8,
            unit="s",
            minimum=0,
            queries=(
                Query(quantile("mp_agent_step_duration_seconds", 0.5), "median"),
                Query(quantile("mp_agent_step_duration_seconds", 0.99), "99th percentile"),
                Query(by_run("mp_agent_step_usual_seconds"), "median of 64 steps", optional=True),
            ),
        ),
        Panel(
            id=41,
            title="Steps per second",
            description="Attempts to step the optimizer per second.",
            width=8,
            unit=PER_SECOND,
            minimum=0,
            queries=(Query(rate("mp_agent_steps_total"), "{{run}}"),),
        ),
        Panel(
            id=42,
            title="Tokens per second",
            description=help_of("mp_agent_tokens_total"),
            width=8,
            unit=PER_SECOND,
            minimum=0,
            soft_maximum=1,
            queries=(Query(rate("mp_agent_tokens_total"), "{{run}}"),),
        ),
        Panel(
            id=43,
            title="Phase",
            description=help_of("mp_agent_phase_info"),
            view=View.TIMELINE,
            width=16,
            height=6,
            queries=(Query(f"max by (phase) ({series('mp_agent_phase_info')})", "{{phase}}"),),
        ),
        Panel(
            id=44,
            title="Last step",
            description=help_of("mp_agent_last_step_timestamp_seconds"),
            view=View.STAT,
            width=8,
            height=6,
            unit="dateTimeFromNow",
            queries=(
                Query(f"{by_run('mp_agent_last_step_timestamp_seconds')} * 1000", instant=True),
            ),
        ),
    ),
)

RUN = Board(
    uid="mp-agent-run",
    title="mp_agent / Run",
    description="The story of one run: is it healthy, what is wrong, since when.",
    one_run=True,
    rows=(_HEALTH, _CONDITIONS, _LOSS, _GRADIENTS, _PACE),
)
