"""What several conditions ask of a run before they judge it, and texts that they share."""

from typing import Literal

from mp_agent.alerting.durations import Duration, duration
from mp_agent.alerting.expressions import (
    TARGET_LABELS,
    Compare,
    Joined,
    Length,
    Number,
    Predicate,
    Seen,
    Series,
    Signal,
    Where,
    all_of,
    any_of,
    limit,
    unless,
)
from mp_agent.catalog.metric import Metric
from mp_agent.catalog.metrics import gradient_layers, gradients, ranks, run, training
from mp_agent.records.steps import Phase

_ZERO = Number(0)


def at_target(metric: Metric, *where: Where) -> Series:
    """Return a signal of each target that shows the run."""
    return Series(metric=metric, where=where, keep=TARGET_LABELS)


_TRAINING = "|".join(
    phase.name.lower() for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)


_USUAL = Series(metric=ranks.STEP_USUAL)
_STANDING = Series(metric=ranks.STANDING, aggregate="min")
"""Time without a step, by the clock of the node agent: whatever was scraped of it, and when.

Of two attempts that overlap, that of the one which makes steps.
"""

STANDING = at_target(ranks.STANDING)
"""The same of each target."""
_USUAL_THERE = at_target(ranks.STEP_USUAL)
_USUAL_PAUSE = Compare(limit("stall_steps") * _USUAL_THERE, ">=", STANDING)


def in_phase(operator: Literal["=", "!~"], name: str) -> Seen:
    """Return whether the rank of a target that is furthest behind is in a phase."""
    return Seen(at_target(run.PHASE, Where("phase", operator, name)))


def standing(hold: Duration) -> Compare:
    """Return whether no step was made for half of a hold and three usual steps.

    What holds longer than that may be of a single step, the last that a run made.
    """
    delay = Number(0.5) * Length(hold) + Number(3) * _USUAL
    return Compare(_STANDING, ">=", delay)


def stopped(
    window: Duration, *, between: Duration | None = None, first_step: Duration | None = None
) -> Joined:
    """Return at which targets a run in training has made no step for longer than `window`.

    Not when ten usual steps take as long, nor when it came back from a pause half as long before:
    rollouts, and evaluations that nothing marks. The first of these is as likely as a hang where no
    rank's backward has begun, so `between` counts there, if it is given. Before its first step
    nothing is usual, and `first_step` counts, if it is given.
    """
    elsewhere = in_phase("!~", _TRAINING)
    longest = at_target(ranks.PAUSE_LONGEST)
    pauses = Compare(Number(2) * longest, ">=", STANDING)
    within_limit = Compare(STANDING, "<=", Length(duration("pause_limit")))
    stands = Compare(STANDING, ">", Length(window))
    excuses: tuple[Predicate, ...] = (elsewhere, _USUAL_PAUSE, all_of(pauses, within_limit))
    if between is not None:
        between_steps = Compare(STANDING, "<=", Length(between))
        excuses += (all_of(between_steps, in_phase("=", Phase.FORWARD.name.lower())),)
    if first_step is None:
        return unless(stands, *excuses)
    return any_of(
        unless(all_of(stands, Seen(_USUAL_THERE)), *excuses),
        unless(Compare(STANDING, ">", Length(first_step)), Seen(_USUAL_THERE), elsewhere),
    )


def loss_falling() -> Predicate:
    """Return whether the loss falls by more than it jumps about: the run learns."""
    return Compare(Series(metric=training.LOSS_FALL, aggregate="min"), ">", Number(1))


def sustained(name: str, steps: str = "sustained_steps") -> Predicate:
    """Return whether all samples of so many steps, by the name of a limit, were beyond a limit."""
    return Compare(sustained_steps(name), ">=", limit(steps))


def sustained_steps(name: str) -> Series:
    """Return for how many steps all samples have been beyond a limit."""
    return Series(metric=gradient_layers.SUSTAINED_STEPS, where=(Where("limit", "=", name),))


def active() -> Compare:
    """Return at which targets the run goes on."""
    return Compare(at_target(run.RUN_ACTIVE), "==", Number(1))


def unjudgeable() -> Predicate:
    """Return whether the last step was non-finite or did not cover all ranks."""
    return any_of(
        Compare(Series(metric=gradients.GRAD_FINITE, aggregate="min"), "==", _ZERO),
        Compare(Series(metric=run.COVERAGE, aggregate="min"), "<", Number(1)),
    )


def happened(count: Signal) -> Predicate:
    """Return whether what is counted happened at least once."""
    return Compare(count, ">", _ZERO)


FIRST_NONFINITE = "{mp_agent_first_nonfinite_info| First seen at |step rank layer phase}"
"""Says in a description where an incident began, as far as evidence names it."""
