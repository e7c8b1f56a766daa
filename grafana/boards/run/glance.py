"""The first row of Run: whether it is healthy."""

from grafana.panel import Panel, Query, Row, View, help_of
from grafana.queries import (
    FIRST_OPTIMIZER,
    by_run,
    last_finite,
    nonfinite_since,
    share_of_steps,
    while_finite,
)
from grafana.style import (
    COVERAGE,
    GRADIENT_NORM,
    LOSS_SCALE,
    RUN_STATE,
    SKIPPED,
    VERDICT,
    alerts_by_severity,
    detected_by_severity,
)
from mp_agent.alerting.conditions.agent import COVERAGE_LOW
from mp_agent.alerting.conditions.gradient_size import GRADIENT_EXPLOSION, GRADIENT_VANISHING
from mp_agent.alerting.conditions.loss_scale import LOSS_SCALE_AT_FLOOR, LOSS_SCALE_LOW
from mp_agent.alerting.conditions.mixed_precision import OVERFLOW_RATIO_HIGH
from mp_agent.alerting.conditions.run import RUN_FAILED

_VERDICT = " or ".join(
    (
        alerts_by_severity(keep=("alertname",)),
        detected_by_severity(keep=("condition",)),
        f"0 * {by_run('mp_agent_run_active')}",
    )
)


_SINCE, _LAST = "NaN or Inf since step", "last"


def _now(expression: str, quantity: str) -> tuple[Query, ...]:
    """Return a value of now; or that it is not finite, since which step, and what it was last."""
    return (
        Query(while_finite(expression, quantity), "now", instant=True, optional=True),
        Query(nonfinite_since(quantity), _SINCE, instant=True, optional=True),
        Query(last_finite(expression, quantity), _LAST, instant=True, optional=True),
    )


def _stat(
    number: int, title: str, description: str, *queries: Query, width: int = 3, **more: object
) -> Panel:
    return Panel(
        id=number,
        title=title,
        description=description,
        queries=queries,
        view=View.STAT,
        width=width,
        height=4,
        **more,  # type: ignore[arg-type]
    )


HEALTH = Row(
    title="Is it healthy?",
    panels=(
        _stat(
            9,
            "Verdict",
            "Highest severity of the firing alerts and of the conditions that the node agent "
            "has detected; the panels below name them.",
            Query(f"max({_VERDICT})"),
            width=4,
            texts=VERDICT,
        ),
        _stat(
            1,
            "State",
            help_of("mp_agent_run_active"),
            Query(by_run("mp_agent_run_active")),
            width=2,
            texts=RUN_STATE,
        ),
        _stat(
            2,
            "End",
            "How the run ended; empty while it is active.",
            Query(
                by_run("mp_agent_run_end_info", keep=("reason",)),
                "{{reason}}",
                instant=True,
                optional=True,
            ),
            width=2,
            label="reason",
            runbooks=(RUN_FAILED,),
        ),
        _stat(
            3,
            "Step",
            help_of("mp_agent_step"),
            Query(by_run("mp_agent_step")),
            unit="none",
            decimals=0,
            width=2,
        ),
        _stat(
            4,
            "Loss now",
            help_of("mp_agent_loss")
            + " While it is NaN or Inf: since which step, and the last finite one.",
            *_now(by_run("mp_agent_loss"), "loss"),
            unit="none",
            colors={_SINCE: "red", _LAST: "text"},
        ),
        _stat(
            5,
            "Norm now",
            "Global norm of the unscaled gradients before clipping. The color is that of the "
            "alerts on explosion and vanishing: red critical, orange warning, blue info. While "
            "gradients are NaN or Inf: since which step, and the last finite norm.",
            *_now(by_run("mp_agent_grad_norm", where=FIRST_OPTIMIZER), "gradients"),
            unit="none",
            steps=GRADIENT_NORM,
            colors={_SINCE: "red", _LAST: "text"},
            runbooks=(GRADIENT_EXPLOSION, GRADIENT_VANISHING),
        ),
        _stat(
            6,
            "Scale",
            "GradScaler's scale; a dash without a scaler. The healthy range is 32 768 to 65 "
            "536; blue below <loss_scale_reduced>, orange below <loss_scale_very_low>, red "
            "below <loss_scale_floor>.",
            Query(by_run("mp_agent_loss_scale", "min"), optional=True),
            unit="none",
            steps=LOSS_SCALE,
            runbooks=(LOSS_SCALE_LOW, LOSS_SCALE_AT_FLOOR),
            width=2,
        ),
        _stat(
            7,
            "Skipped",
            "Recent share of the attempted steps that GradScaler skipped.",
            Query(share_of_steps("mp_agent_skipped_steps_total")),
            width=3,
            unit="percentunit",
            steps=SKIPPED,
            runbooks=(OVERFLOW_RATIO_HIGH,),
        ),
        _stat(
            8,
            "Coverage",
            help_of("mp_agent_coverage_ratio"),
            Query(by_run("mp_agent_coverage_ratio", "min")),
            width=3,
            unit="percentunit",
            steps=COVERAGE,
            runbooks=(COVERAGE_LOW,),
        ),
    ),
)
