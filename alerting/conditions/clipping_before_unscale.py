"""MpAgentClippingBeforeUnscale."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.predicates import Compare
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Series, limit

_STEPS = Series(metric=metrics.CLIP_SCALED_STEPS)

_EVERY_STEP = Example(
    title="clipping that comes before unscale_ at every step",
    minutes=20,
    tracks=(Track(metrics.CLIP_SCALED_STEPS, (*flat(0, 5), *ramp(60, 60, 8), 0)),),
    fires={
        Severity.WARNING: "Run demo clips gradients that are still multiplied by the loss scale, "
        "on 360 steps in a row."
    },
    at=10,
    not_yet=(4, 14),
)

_FEW = Example(
    title="a few steps on which the norm happens to be so",
    minutes=12,
    tracks=(Track(metrics.CLIP_SCALED_STEPS, (0, 3, 0, 2, 0)),),
)

CLIPPING_BEFORE_UNSCALE = Condition(
    name="MpAgentClippingBeforeUnscale",
    summary="Gradients are clipped before they are unscaled.",
    meaning="The limit applies to gradients multiplied by the loss scale, so that every step is "
    "shrunk by about that factor: plain SGD hardly moves, and Adam's steps lose their limit.",
    confirm="mp_agent_clip_coefficient is about max_norm divided by the loss scale and the "
    "norm at every step, and mp_agent_clipped_steps_total grows with every step.",
    remedies=("Call scaler.unscale_(optimizer) before clipping, then scaler.step(optimizer).",),
    why="GradScaler multiplies the gradients until unscale_ or step divides them again; only "
    "after that has a limit the units of the gradient.",
    levels=(
        Level(
            severity=Severity.WARNING,
            when=Compare(_STEPS, ">=", limit("scaled_clip_steps")),
            description="Run {run} clips gradients that are still multiplied by the loss scale, "
            "on {value|count} steps in a row.",
            reason="It does not wait: scaled_clip_steps in a row are its patience.",
        ),
    ),
    firing=(_EVERY_STEP,),
    quiet=(_FEW,),
)
