"""MpAgentNothingTrained."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.guards import loss_falling
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.examples.healthy import noisy
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, Predicate, any_of, unless
from mp_agent.alerting.expressions.signals import Series, Where, limit
from mp_agent.alerting.first_line.triage import Triage
from mp_agent.alerting.severity import Severity

_CERTAIN = "all gradients 0|loss 0 with non-finite gradients"
_TEXT = "Run {run} cannot have learned anything for {value|count} steps: {reason}."


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
_NO_GRADIENTS = _example("optimizer steps without any gradient", "no gradients", Severity.WARNING)

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
    title="a rounded loss that is constant for some time",
    minutes=30,
    tracks=(
        Track(metrics.UNTRAINED_STEPS, (*ramp(10, 16, 29), "stale"), {"reason": "constant loss"}),
    ),
)

NOTHING_TRAINED = Condition(
    name="MpAgentNothingTrained",
    summary="Steps continue, but nothing is trained.",
    meaning="The optimizer steps, but the weights cannot improve: the run wastes compute.",
    confirm="mp_agent_untrained_steps shows duration and reason; compare mp_agent_loss, "
    "mp_agent_grad_norm and mp_agent_learning_rate.",
    remedies=(
        "Check the inputs of the loss: labels that are all masked, a detached output, a model "
        "in inference mode or with all parameters frozen.",
        "Check the learning-rate schedule: its number of steps may be smaller than the run's.",
        "If gradients are not finite, stop, and resume from a checkpoint from before the first "
        "such step.",
    ),
    why="An optimizer steps with any gradient; a gradient or learning rate of 0 does not change "
    "the weights, and some trainers log a NaN loss as 0.",
    levels=(
        Level(
            severity=Severity.CRITICAL,
            triage=Triage(
                weights="not trained since {since}",
                now="stop, and check labels, loss and frozen parameters before you resume",
            ),
            when=_for(_CERTAIN, "untrained_steps"),
            description=_TEXT,
            reason="No delay: the condition already requires untrained_steps consecutive steps.",
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
            reason="A falling loss shows that the model still learns, and it takes some minutes "
            "to detect that.",
        ),
    ),
    firing=(_ZEROS, _ZERO_LOSS, _ZERO_RATE, _CONSTANT, _NO_GRADIENTS),
    quiet=(_LEARNS, _FEW, _ROUNDED),
)
