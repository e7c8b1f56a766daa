"""Causes that ranks show by differing step after step: nothing reduces, or some make NaN."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.diagnosis import (
    DECISIVE,
    MEDIUM,
    STRONG,
    Argument,
    Causes,
    Diagnosis,
)
from mp_agent.records.columns import GRADIENTS
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
