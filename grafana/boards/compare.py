"""Compare: two runs, against the training step in place of the time."""

from dataclasses import replace

from grafana.panel import STEP, Board, Panel, Query, Row, View, help_of
from grafana.queries import FIRST_OPTIMIZER, by_run, of_other_run, while_finite
from grafana.style import LOSS_IS_LINEAR_TO

_POINTS = 3000
"""Of a run at most; between two runs that are far apart there is nothing to draw."""


def _alone(expression: str) -> str:
    """Return one series of a run, whichever cluster, namespace and job it is in."""
    return f"max by (run) ({expression})"


def _by_step(number: int, title: str, description: str, expression: str, **more: object) -> Panel:
    step = Query(_alone(by_run("mp_agent_step")), STEP)
    value = Query(_alone(expression), "{{run}}", optional=True)
    other = (replace(query, expression=of_other_run(query.expression)) for query in (step, value))
    return Panel(
        id=number,
        title=title,
        description=description,
        queries=(step, value, *other),
        view=View.BY_STEP,
        width=12,
        height=11,
        most_points=_POINTS,
        **more,  # type: ignore[arg-type]
    )


COMPARE = Board(
    uid="mp-agent-compare",
    title="mp_agent / Compare",
    description="Two runs against the training step: where one leaves the other.",
    one_run=True,
    two_runs=True,
    since="now-7d",
    rows=(
        Row(
            title="Against the step",
            panels=(
                _by_step(
                    1,
                    "Loss",
                    help_of("mp_agent_loss")
                    + " A point per run and moment at which Prometheus has both step and loss. "
                    "Points end where the loss is NaN or Inf, and go back where a run resumed from "
                    "an earlier step. The axis is logarithmic.",
                    while_finite(by_run("mp_agent_loss"), "loss"),
                    log_base=10,
                    log_around_zero=LOSS_IS_LINEAR_TO,
                    many_decades=True,
                ),
                _by_step(
                    2,
                    "Gradient norm",
                    "Global norm before clipping, log scale. Points end where gradients are NaN or "
                    "Inf.",
                    while_finite(by_run("mp_agent_grad_norm", where=FIRST_OPTIMIZER), "gradients"),
                    log_base=10,
                    many_decades=True,
                ),
                _by_step(
                    3,
                    "Loss scale",
                    "GradScaler's scale, log2. Without points, neither run has a scaler.",
                    by_run("mp_agent_loss_scale", "min"),
                    unit="none",
                    log_base=2,
                    many_decades=True,
                ),
                _by_step(
                    4,
                    "Learning rate",
                    help_of("mp_agent_learning_rate"),
                    by_run("mp_agent_learning_rate"),
                ),
            ),
        ),
    ),
)
