"""MpAgentClippingBeforeUnscale."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Series, limit
from mp_agent.alerting.severity import Severity

_STEPS = Series(metric=metrics.CLIP_SCALED_STEPS)

_EVERY_STEP = Example(
    title="clipping that comes before unscale_ at every step",
    minutes=20,
    tracks=(Track(metrics.CLIP_SCALED_STEPS, (*flat(0, 5), *ramp(60, 60, 8), 0)),),
    fires={
        Severity.WARNING: "Run demo clips gradients that are still multiplied by the loss "
        "scale, on 360 consecutive steps."
    },
    at=10,
    not_yet=(4, 14),
)

_FEW = Example(
    title="a few steps whose norm has that value by chance",
    minutes=12,
    tracks=(Track(metrics.CLIP_SCALED_STEPS, (0, 3, 0, 2, 0)),),
)

CLIPPING_BEFORE_UNSCALE = Condition(
    name="MpAgentClippingBeforeUnscale",
    summary="Gradients are clipped before they are unscaled.",
    meaning="The limit applies to gradients multiplied by the loss scale, so every step is "
    "shrunk by about that factor: plain SGD hardly moves, and Adam's steps are not limited.",
    confirm="mp_agent_clip_coefficient is about max_norm divided by the loss scale and the "
    "norm at every step, and mp_agent_clipped_steps_total grows with every step.",
    remedies=("Call scaler.unscale_(optimizer) before clipping, then scaler.step(optimizer).",),
    why="GradScaler multiplies the gradients until unscale_ or step divides them again; only "
    "then does a limit have the units of the gradient.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_STEPS, ">=", limit("scaled_clip_steps")),
            counts_steps=True,
            description="Run {run} clips gradients that are still multiplied by the loss scale, "
            "on {value|count} consecutive steps.",
            reason="No delay: the condition already requires scaled_clip_steps consecutive steps.",
        ),
    ),
    firing=(_EVERY_STEP,),
    quiet=(_FEW,),
)
