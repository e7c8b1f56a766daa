"""The fourth row of Run: the gradients."""

from grafana.panel import Panel, Query, Row, Step, View, above, help_of
from grafana.queries import FIRST_OPTIMIZER, by_run, increase, share_of_steps, while_finite
from grafana.style import GRADIENT_NORM_LINES, NORM_REACHES
from mp_agent.alerting.conditions.gradient_size import (
    GRADIENT_EXPLOSION,
    GRADIENT_VANISHING,
    HEADROOM_VANISHING,
)
from mp_agent.alerting.conditions.nonfinite import NONFINITE_UPDATE

_COLLECTION = ("collection",)


def _finite(name: str, aggregate: str = "max", *, where: str = "") -> str:
    """Return a gauge of the gradients of steps that count; its curve ends with the first NaN."""
    return while_finite(by_run(name, aggregate, where=where), "gradients")


GRADIENTS = Row(
    title="Gradients",
    panels=(
        Panel(
            id=30,
            title="Gradient norm",
            description="Global norm, unscaled and before clipping, with the largest and "
            "smallest of the last two minutes, so that a single step is visible at any scrape "
            "interval. The healthy range is 0.1 to 10. Dashed: the limits of explosion "
            "(<grad_norm_high>, <grad_norm_extreme>) and of vanishing (<grad_norm_low>, "
            "<grad_norm_very_low>, <grad_norm_vanished>).",
            width=16,
            height=10,
            log_base=10,
            many_decades=True,
            lines=True,
            steps=GRADIENT_NORM_LINES,
            reaches=NORM_REACHES,
            queries=(
                Query(_finite("mp_agent_grad_norm", where=FIRST_OPTIMIZER), "norm"),
                Query(
                    by_run("mp_agent_grad_norm_window_max", where=FIRST_OPTIMIZER),
                    "largest in the window",
                ),
                Query(
                    by_run("mp_agent_grad_norm_window_min", "min", where=FIRST_OPTIMIZER),
                    "smallest in the window",
                ),
                Query(by_run("mp_agent_clip_max_norm"), "clipping limit", optional=True),
            ),
            runbooks=(GRADIENT_EXPLOSION, GRADIENT_VANISHING),
        ),
        Panel(
            id=31,
            title="Clipping",
            description="Factor that clipping applied to the gradients of the last step: 1 "
            "means no change. A factor that is always far below 1 means that the limit "
            "determines the step size.",
            width=8,
            height=10,
            minimum=0,
            maximum=1,
            queries=(
                Query(_finite("mp_agent_clip_coefficient", "min"), "coefficient", optional=True),
                Query(share_of_steps("mp_agent_clipped_steps_total"), "share of steps clipped"),
            ),
        ),
        Panel(
            id=35,
            title="Steps beyond the limits",
            description=help_of("mp_agent_grad_norm_exceeded_steps_total")
            + " Steps that clipping reduced are less severe: the others are shown separately.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(
                    increase("mp_agent_grad_norm_exceeded_steps_total", keep=("bound",)),
                    "{{bound}} norm",
                ),
                Query(
                    increase("mp_agent_grad_norm_unclipped_steps_total", keep=("bound",)),
                    "{{bound}} norm, not clipped",
                ),
                Query(
                    f"1 - {by_run('mp_agent_grad_finite', 'min', where=FIRST_OPTIMIZER)}",
                    "last step not finite",
                ),
            ),
            runbooks=(GRADIENT_EXPLOSION,),
        ),
        Panel(
            id=37,
            title="Headroom to FP16's largest number",
            description=help_of("mp_agent_grad_fp16_headroom")
            + " Below 1 (dashed), the next doubling of the loss scale overflows. Far above 10, "
            "small gradients underflow unnecessarily; below 0 the step overflowed. There is no "
            "alert: GradScaler grows until it overflows.",
            unit="suffix: bits",
            decimals=0,
            nothing="No loss scale",
            lines=True,
            steps=(Step(None, "blue"), Step(1, "green")),
            queries=(
                Query(_finite("mp_agent_grad_fp16_headroom", "min"), "headroom", optional=True),
            ),
        ),
        Panel(
            id=65,
            title="Gradients by magnitude",
            nothing="Needs measure_distribution",
            description=help_of("mp_agent_grad_exponent_elements")
            + " A band that moves down will underflow in FP16; one that widens leaves no loss "
            "scale that suits all.",
            view=View.HEATMAP,
            width=16,
            height=9,
            queries=(
                Query(
                    by_run("mp_agent_grad_exponent_elements", keep=("below",)),
                    "{{below}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=64,
            title="Lost in FP16 at the loss scale",
            nothing="Needs measure_distribution and a loss scale",
            description=help_of("mp_agent_grad_fp16_flushed_ratio")
            + " Dashed: the limit (<fp16_flushed>).",
            width=8,
            height=9,
            unit="percentunit",
            minimum=0,
            maximum=1,
            lines=True,
            steps=above(fp16_flushed="orange"),
            queries=(
                Query(
                    by_run("mp_agent_grad_fp16_flushed_ratio", keep=("scale",)),
                    "{{scale}}",
                    optional=True,
                ),
            ),
            runbooks=(HEADROOM_VANISHING,),
        ),
        Panel(
            id=34,
            title="Non-finite elements and steps",
            description="NaN and Inf gradient elements, and the steps with any. With a scaler "
            "such steps are skipped; without one they destroy the weights.",
            minimum=0,
            soft_maximum=1,
            queries=(
                Query(increase("mp_agent_grad_nonfinite_steps_total"), "steps"),
                Query(increase("mp_agent_grad_nan_elements_total"), "NaN elements"),
                Query(increase("mp_agent_grad_inf_elements_total"), "Inf elements"),
                Query(increase("mp_agent_loss_nonfinite_steps_total"), "steps with such a loss"),
            ),
            runbooks=(NONFINITE_UPDATE,),
        ),
        Panel(
            id=32,
            title="Largest gradient element",
            description=help_of("mp_agent_grad_abs_max"),
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
            queries=(
                Query(_finite("mp_agent_grad_abs_max", where=FIRST_OPTIMIZER), "largest element"),
            ),
        ),
        Panel(
            id=33,
            title="Zero elements",
            description=help_of("mp_agent_grad_zero_ratio"),
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(Query(_finite("mp_agent_grad_zero_ratio", where=FIRST_OPTIMIZER), "zeros"),),
        ),
        Panel(
            id=38,
            title="Gradient norm per optimizer",
            description="Runs with several optimizers have one norm for each: parts of the "
            "run's norm above if they train one model (Muon with AdamW), independent norms if "
            "they train different models (the critic of a GAN).",
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
            nothing="One optimizer",
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
        Panel(
            id=36,
            title="Gradient norm of collections",
            description=help_of("mp_agent_collection_grad_norm")
            + " Collections are groups of parameters that the script defines by "
            "mp_agent.collection.",
            unit="sci",
            decimals=1,
            log_base=10,
            many_decades=True,
            nothing="No collection is defined",
            queries=(
                Query(
                    "topk(10, " + by_run("mp_agent_collection_grad_norm", keep=_COLLECTION) + ")",
                    "{{collection}}",
                    optional=True,
                ),
            ),
        ),
        Panel(
            id=39,
            title="Collections near FP16's overflow",
            description=help_of("mp_agent_collection_grad_fp16_near_overflow_ratio")
            + " Healthy is a share that stays below 1 % and does not rise. Measured with "
            "measure_distribution and a loss scale.",
            unit="percentunit",
            minimum=0,
            soft_maximum=0.01,
            nothing="No collection is defined",
            queries=(
                Query(
                    "topk(10, "
                    + by_run("mp_agent_collection_grad_fp16_near_overflow_ratio", keep=_COLLECTION)
                    + ")",
                    "{{collection}}",
                    optional=True,
                ),
            ),
        ),
    ),
)
