"""MpAgentNothingTrained."""

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.durations import duration
from mp_agent.alerting.examples.example import Example, Track, flat, ramp
from mp_agent.alerting.expressions import metrics
from mp_agent.alerting.expressions.predicates import Compare, Predicate, any_of
from mp_agent.alerting.expressions.signals import Series, Where, limit
from mp_agent.alerting.first_line.triage import Triage
from mp_agent.alerting.severity import Severity

_CERTAIN = "all gradients 0|loss 0 with non-finite gradients"
_PROBABLE = "learning rate 0|no gradients|loss 0|constant loss and gradient norm"
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
        not_yet=(5 if certain else 7, 40),
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
_CONSTANT = _example("a loss that is the same on every step", "constant loss", Severity.WARNING)
_NO_GRADIENTS = _example("optimizer steps without any gradient", "no gradients", Severity.WARNING)
_VANISHED = _example(
    "a loss that was above 0 and is exactly 0 on every step", "loss 0", Severity.WARNING
)
_SAME = _example(
    "a loss and a gradient norm that are the same on every step",
    "constant loss and gradient norm",
    Severity.WARNING,
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
        "If the loss is exactly 0 or the same on every step, check the weights of the last "
        "checkpoint: they may have been damaged before, as adapters are by a wrong data type.",
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
            counts_steps=True,
            description=_TEXT,
            reason="No delay: the condition already requires untrained_steps consecutive steps.",
        ),
        Level(
            severity=Severity.WARNING,
            when=any_of(
                _for(_PROBABLE, "untrained_steps"), _for("constant loss", "constant_loss_steps")
            ),
            counts_steps=True,
            hold=duration("untrained_hold"),
            description=_TEXT,
            reason="The node agent leaves out what a falling loss disproves, which takes it some "
            "losses to see.",
        ),
    ),
    firing=(_ZEROS, _ZERO_LOSS, _ZERO_RATE, _CONSTANT, _NO_GRADIENTS, _VANISHED, _SAME),
    quiet=(_FEW, _ROUNDED),
)
