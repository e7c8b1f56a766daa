"""MpAgentGradientsNotReduced."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare
from mp_agent.alerting.expressions.signals import Number, Series
from mp_agent.alerting.first_line.triage import ROLL_BACK, Triage
from mp_agent.alerting.severity import Severity

_STEPS = Series(metric=metrics.REPLICA_UNREDUCED_STEPS)

_NEVER = Example(
    title="a loss that is computed past the wrapper",
    minutes=20,
    tracks=(Track(metrics.REPLICA_UNREDUCED_STEPS, (*flat(0, 5), *ramp(60, 60, 8), 0)),),
    fires={
        Severity.CRITICAL: "No collective reduced the gradients of run demo for 360 consecutive "
        "steps: each rank trains a model of its own."
    },
    at=10,
    not_yet=(4, 14),
)

_AVERAGED = Example(
    title="local SGD, which averages the weights now and then",
    minutes=12,
    tracks=(Track(metrics.REPLICA_UNREDUCED_STEPS, (0,)),),
)

GRADIENTS_NOT_REDUCED = Condition(
    name="MpAgentGradientsNotReduced",
    summary="Never reduced: no collective reduced these gradients.",
    meaning="Every rank steps with the gradients of its own data, so that as many models are "
    "trained as there are ranks, each on its part of the data; a checkpoint contains one of them.",
    confirm="mp_agent_replica_unreduced_steps is the number of steps since the ranks last had "
    "equal weights; mp_agent_rank_loss of the ranks part.",
    remedies=(
        "Call the wrapper itself: loss = model(batch), not model.module(batch), which bypasses "
        "DistributedDataParallel and its reduction.",
        "Leave no_sync() before the backward of the last micro-batch: its backward is the one "
        "that reduces.",
        "Without a wrapper, average the gradients over all ranks before optimizer.step().",
        "Resume from a checkpoint, so that all ranks load the same weights.",
        "For local SGD with a longer period, raise unreduced_steps above it; ranks that train "
        "models of their own on purpose are declared so: mp_agent.declare(model).",
    ),
    why="Nothing fails when a reduction is left out: each loss falls, only more slowly and to a "
    "worse model than the batch size of all ranks together would give.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(weights="damaged, since ranks hold different ones", now=ROLL_BACK),
            when=Compare(_STEPS, ">", Number(0)),
            counts_steps=True,
            description="No collective reduced the gradients of run {run} for {value|count} "
            "consecutive steps: each rank trains a model of its own.",
            reason="No delay: the condition already requires unreduced_steps consecutive steps, or "
            "gradients that a wrapper says are the same and of which no two ranks' are.",
        ),
    ),
    firing=(_NEVER,),
    quiet=(_AVERAGED,),
)
