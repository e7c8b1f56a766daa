"""MpAgentNothingTrained."""

from mp_agent.alerting import metrics
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import loss_falling
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples import Example, Track, flat, ramp
from mp_agent.alerting.healthy import noisy
from mp_agent.alerting.predicates import Compare, Predicate, any_of, unless
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Series, Where, limit

_CERTAIN = "all gradients 0|loss 0 with non-finite gradients"
_TEXT = "For {value|count} steps run {run} can have learned nothing: {reason}."


def _for(reasons: str, threshold: str) -> Predicate:
    where = (Where("reason", "=~", reasons),)
    steps = Series(metric=metrics.UNTRAINED_STEPS, where=where, keep=("reason",))
    return Compare(steps, ">=", limit(threshold))


def _example(title: str, reason: str, severity: Severity) -> Example:
    text = _TEXT.replace("{run}", "demo").replace("{reason}", reason)
    counts = (*flat(None, 5), *ramp(60, 60, 30), "stale")
    certain = severity is Severity.CRITICAL
    return Example(
        title=title,
        minutes=40,
        tracks=(Track(metrics.UNTRAINED_STEPS, counts, {"reason": reason}),),
        fires={severity: text.replace("{value|count}", "1800")},
        labels={"reason": reason},
        at=34,
        not_yet=(5 if certain else 19, 40),
    )


_ZEROS = _example(
    "a loss and gradients that are exactly 0 at every step", "all gradients 0", Severity.CRITICAL
)
_ZERO_LOSS = _example(
    "a loss of exactly 0 whose gradients are not finite",
    "loss 0 with non-finite gradients",
    Severity.CRITICAL,
)
_ZERO_RATE = _example(
    "a learning rate that has decayed to 0 while steps go on", "learning rate 0", Severity.WARNING
)
_CONSTANT = _example(
    "a loss that is exactly the same on every step", "constant loss", Severity.WARNING
)
_NO_GRADIENTS = _example(
    "steps of the optimizer without any gradient", "no gradients", Severity.WARNING
)

_LEARNS = Example(
    title="a first group with learning rate 0 on purpose, while the loss falls",
    minutes=30,
    tracks=(
        Track(metrics.UNTRAINED_STEPS, ramp(60, 60, 30), {"reason": "learning rate 0"}),
        Track(metrics.LOSS, noisy(3.0, 31, slope=-0.06)),
    ),
)

_FEW = Example(
    title="a few steps at learning rate 0, as at both ends of a schedule",
    minutes=12,
    tracks=(
        Track(metrics.UNTRAINED_STEPS, (1, 2, 3, "stale"), {"reason": "learning rate 0"}),
        Track(metrics.UNTRAINED_STEPS, (1, 2, 3, "stale"), {"reason": "all gradients 0"}),
    ),
)

_ROUNDED = Example(
    title="a loss that is rounded, and is the same for a while",
    minutes=30,
    tracks=(
        Track(metrics.UNTRAINED_STEPS, (*ramp(10, 16, 29), "stale"), {"reason": "constant loss"}),
    ),
)

NOTHING_TRAINED = Condition(
    name="MpAgentNothingTrained",
    summary="Steps go on, and nothing is trained.",
    meaning="The optimizer is stepped, but the weights cannot change to the better: the run burns "
    "compute for nothing.",
    confirm="mp_agent_untrained_steps says for how long and why; compare mp_agent_loss, "
    "mp_agent_grad_norm and mp_agent_learning_rate.",
    remedies=(
        "Check what the loss is computed from: labels that are all masked, an output that is "
        "detached, a model in inference mode or with every parameter frozen.",
        "Check the learning-rate schedule: its number of steps may be smaller than the run's.",
        "If gradients are not finite, stop, and resume from a checkpoint from before the first.",
    ),
    why="An optimizer steps whatever it is given; a gradient or learning rate of 0 leaves the "
    "weights as they are, and some trainers log a NaN loss as 0.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            when=_for(_CERTAIN, "untrained_steps"),
            description=_TEXT,
            reason="It does not wait: untrained_steps in a row are its patience.",
        ),
        Level(
            severity=Severity.WARNING,
            when=unless(
                any_of(
                    _for("learning rate 0|no gradients", "untrained_steps"),
                    _for("constant loss", "constant_loss_steps"),
                ),
                loss_falling(),
            ),
            hold=duration("untrained_hold"),
            description=_TEXT,
            reason="A loss that falls shows that something is trained, and it takes some minutes "
            "to see whether it does.",
        ),
    ),
    firing=(_ZEROS, _ZERO_LOSS, _ZERO_RATE, _CONSTANT, _NO_GRADIENTS),
    quiet=(_LEARNS, _FEW, _ROUNDED),
)
