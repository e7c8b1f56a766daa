"""Causes that ranks or batches show: nothing reduces, some make NaN, one was off, odd batches."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from math import isfinite
from statistics import median

from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.diagnosis import (
    DECISIVE,
    MEDIUM,
    STRONG,
    WEAK,
    Argument,
    Causes,
    Diagnosis,
)
from mp_agent.records.columns import GRADIENTS, LOCAL_GRAD_NORM
from mp_agent.records.merged import MergedStep

_APART_MIN = 2
"""Steps in a row on which the gradients of replicas differ, although a wrapper is to reduce them:
after a fault of one rank, the next reduction makes them equal again."""
_APART_ON_PURPOSE = 10
"""Such steps where the wrapper itself says that it reduces nothing, as under local SGD."""


def apart(case: Case) -> list[MergedStep]:
    """Return the last steps of the record, if the gradients of replicas differed on all of them.

    Empty unless they were equal before, or the run began with them: ranks that train apart by turns
    do so on purpose.
    """
    compared = [(step, differ) for step in case.steps if (differ := _differ(step)) is not None]
    last: list[MergedStep] = []
    for step, differ in reversed(compared):
        if not differ:
            break
        last.insert(0, step)
        if step.reduction is not None and step.reduction.equal_before:
            break
    if not last:
        return []
    before = compared[: len(compared) - len(last)]
    began = not before[-1][1] if before else last[0].sequence == 1
    needed = _APART_MIN if any(map(_is_claimed, last)) else _APART_ON_PURPOSE
    return last if began and len(last) >= needed else []


def _differ(step: MergedStep) -> bool | None:
    """Return whether replicas that a wrapper made used different gradients; None if not known."""
    wrapped = step.reduction is not None and step.reduction.wrapped
    if step.skipped or not (wrapped or GRADIENTS.name in step.replicas):
        return None
    parts = wrapped and step.reduction is not None and step.reduction.parts
    return parts or _digests_differ(step)


def _digests_differ(step: MergedStep) -> bool:
    found = step.replicas.get(GRADIENTS.name)
    return found is not None and not found.agree


def _is_claimed(step: MergedStep) -> bool:
    """Return whether something was to reduce the gradients that differ all the same."""
    return _digests_differ(step) or (step.reduction is not None and step.reduction.claimed)


def apart_begin(case: Case, sequence: int) -> int:
    """Return the first of the steps on which nothing reduced the gradients."""
    return next((step.sequence for step in apart(case)), sequence)


def not_reduced(case: Case, _: int) -> Iterator[Argument]:
    """Yield that the gradients of replicas differ on every step, and what that rules out."""
    if not (steps := apart(case)):
        return
    text = (
        f"The gradients of replicas differed on all {len(steps)} compared steps from step "
        f"{steps[0].step} on"
    )
    if steps[0].sequence > 1:
        text += ", and were equal before it"
    yield Argument(f"{text}.", STRONG)
    if any(map(_is_claimed, steps)):
        yield Argument(
            "The memory or a GPU of one rank does not do that: after such a fault the next "
            "reduction gives all ranks the same gradients again.",
            MEDIUM,
        )


def own_nan(case: Case) -> Iterator[Diagnosis]:
    """Yield the ranks whose own gradients were NaN on step after step that a scaler skipped.

    An overflow makes Inf, mostly on all ranks, until the scale is low enough. NaN on the same few
    ranks on several steps in a row is not one.
    """
    steps = _same_ranks(case)
    if not steps:
        return
    first, ranks = steps[0], steps[0].nonfinite_gradient_ranks
    others = len(first.present_ranks) - len(ranks)
    named = ", ".join(map(str, ranks))
    text = (
        f"On {len(steps)} skipped steps in a row, from step {first.step} on, the own gradients of "
        f"rank {named} were NaN, and those of {others} other(s) finite: observed before they were "
        "reduced."
    )
    arguments_for = [Argument(text, DECISIVE)]
    scales = [step.loss_scale for step in steps if step.loss_scale]
    if scales and scales[-1] < scales[0]:
        text = f"No loss scale from {scales[0]:g} down to {scales[-1]:g} changed that: no overflow."
        arguments_for.append(Argument(text, MEDIUM))
    yield Diagnosis(
        cause=Causes.OWN_NAN.value,
        sequence=first.sequence,
        step=first.step,
        rank=",".join(map(str, ranks)),
        phase=Causes.OWN_NAN.value.phase,
        arguments_for=tuple(arguments_for),
    )


_SAME_RANKS_MIN = 3


def _same_ranks(case: Case) -> Sequence[MergedStep]:
    """Return the first skipped steps in a row on which the same ranks alone had NaN."""
    for at, first in enumerate(case.steps):
        found = list(takewhile(partial(_alike, first), case.steps[at:]))
        if len(found) >= _SAME_RANKS_MIN:
            return found
    return ()


def _alike(first: MergedStep, step: MergedStep) -> bool:
    """Return whether a step was skipped for NaN of some ranks, the same as on the first one."""
    blamed = step.nonfinite_gradient_ranks
    some = 0 < len(blamed) < len(step.present_ranks) and blamed == first.nonfinite_gradient_ranks
    in_backward = bool(step.get("nan_elements")) and not step.flag("loss_nonfinite")
    return step.skipped and some and in_backward


_RECOVERS_STEPS = 10
_OFF = 10.0
"""How often its own usual value, and that of all other ranks, a rank's must be to be off."""
_USUAL_STEPS = 20


def unusual_batch(case: Case) -> Iterator[Diagnosis]:
    """Yield the step with the worst batch whose loss and norm jumped and recovered.

    A single such step is no alert, since the run is not in danger; of what went wrong later it may
    be the cause all the same.
    """
    found = [
        step
        for before, step in pairwise(case.judged)
        if _jumps(case, step) and not _jumps(case, before) and _recovers(case, step)
    ]
    if not found:
        return
    worst = max(found, key=norm_of)
    usual = case.usual(worst)
    grown = norm_of(worst) / (usual.norm or 1.0)
    text = (
        f"On step {worst.step} the loss was {worst.get('loss'):.3g} against a usual "
        f"{usual.loss or 0.0:.3g}, and the gradient norm {grown:.3g} "
        "times its usual value; the step before it was normal."
    )
    rank = _single(_values_of(case, "loss", worst.sequence))
    arguments_for = [
        Argument(text, STRONG),
        Argument(f"Within {_RECOVERS_STEPS} steps the loss was back at its usual level.", MEDIUM),
    ]
    if rank is not None:
        text = f"It was the loss of rank {rank} alone: its batch, or its hardware."
        arguments_for.append(Argument(text, DECISIVE))
    against = [
        Argument(f"The learning rate was {ratio:.3g} times that of the step before.", STRONG)
        for ratio in _rate_changes(case, worst)
    ]
    if len(found) > _RECOVERS_STEPS:
        text = f"It happened on {len(found)} steps: rather the data as a whole than a batch."
        against.append(Argument(text, WEAK))
    yield Diagnosis(
        cause=Causes.UNUSUAL_BATCH.value,
        sequence=worst.sequence,
        step=worst.step,
        rank="" if rank is None else str(rank),
        phase=Causes.UNUSUAL_BATCH.value.phase,
        arguments_for=tuple(arguments_for),
        arguments_against=tuple(against),
    )


def _jumps(case: Case, step: MergedStep) -> bool:
    """Return whether loss and norm are far above what was usual."""
    usual = case.usual(step)
    return usual.loss_above and usual.exploded


def _recovers(case: Case, step: MergedStep) -> bool:
    bound = case.usual(step).loss_bound
    after = [s for s in case.steps if 0 < s.sequence - step.sequence <= _RECOVERS_STEPS]
    losses = case.losses(after)
    return bound is not None and bool(losses) and losses[-1] <= bound


def _rate_changes(case: Case, step: MergedStep) -> Iterator[float]:
    before = case.step_at(step.sequence - 1)
    rate, earlier = step.get("learning_rate"), before.get("learning_rate") if before else None
    if rate and earlier and rate > 2 * earlier:
        yield rate / earlier


def one_rank(case: Case) -> Iterator[Diagnosis]:
    """Yield the first step of an explosion, if the gradients or the loss of one rank began it.

    A batch whose loss jumped, and from which the run recovered, is an unusual one instead.
    """
    for step in _first_exploded(case):
        if _jumps(case, step) and _recovers(case, step):
            return
        for column, what in ((LOCAL_GRAD_NORM, "own gradient norm"), ("loss", "loss")):
            values = _values_of(case, column, step.sequence)
            rank = _single(values)
            usual = _usual(case, column, rank, step.sequence) if rank is not None else None
            if rank is None or usual is None or values[rank] <= _OFF * usual:
                continue
            yield _off(case, step, rank, what, values, usual)
            return


def _first_exploded(case: Case) -> list[MergedStep]:
    """Return the first step with a norm far above the usual one, if the one before was normal."""
    exploded = [step for step in case.judged if case.usual(step).exploded]
    return [
        step
        for step in exploded[:1]
        for before in case.before(step.sequence, 1)
        if not case.usual(before).loss_above
    ]


def _off(
    case: Case, step: MergedStep, rank: int, what: str, values: Mapping[int, float], usual: float
) -> Diagnosis:
    others = [value for other, value in values.items() if other != rank]
    text = (
        f"On step {step.step} the {what} of rank {rank} was {values[rank]:.3g}, against its usual "
        f"{usual:.3g} and at most {max(others):.3g} on the {len(others)} other rank(s)."
    )
    arguments_for = [Argument(text, DECISIVE)]
    before = case.before(step.sequence, 1)[0]
    if step.get("learning_rate") == before.get("learning_rate"):
        arguments_for.append(
            Argument("The learning rate was that of the step before, which was normal.", WEAK)
        )
    grown = norm_of(step) / (case.usual(step).norm or 1.0)
    arguments_for.append(
        Argument(f"The gradient norm of the run was {grown:.3g} times its usual value there.", WEAK)
    )
    return Diagnosis(
        cause=Causes.ONE_RANK_OFF.value,
        sequence=step.sequence,
        step=step.step,
        rank=str(rank),
        arguments_for=tuple(arguments_for),
    )


def _single(values: Mapping[int, float]) -> int | None:
    """Return the rank whose value is far above those of all others, if there is one."""
    if len(values) < 2:
        return None
    worst = max(values, key=lambda rank: values[rank])
    others = [value for rank, value in values.items() if rank != worst]
    return worst if values[worst] > _OFF * max(others) > 0 else None


def _usual(case: Case, column: str, rank: int | None, sequence: int) -> float | None:
    """Return the median of a rank's values on the steps before one; None without any."""
    before = [
        value
        for step in case.before(sequence, _USUAL_STEPS)
        for own, value in _values_of(case, column, step.sequence).items()
        if own == rank
    ]
    return median(before) if before else None


def _values_of(case: Case, column: str, sequence: int) -> dict[int, float]:
    """Return the finite values of a step's column, by rank."""
    return dict(_found(case, column, sequence))


def _found(case: Case, column: str, sequence: int) -> Iterator[tuple[int, float]]:
    for log in case.evidence.ranks:
        for segment in log.segments:
            if column not in segment.schema.step_columns:
                continue
            at = segment.schema.step_columns.index(column)
            for record in segment.steps:
                if record.sequence == sequence and isfinite(record.values[at]):
                    yield log.identity.rank, float(record.values[at])
