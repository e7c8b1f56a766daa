"""A batch unlike the others: the loss jumps before any update could have caused it."""

from collections.abc import Iterator, Sequence
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
from mp_agent.records.merged import MergedStep

_BEFORE_STEPS = 50
_RECOVERS_STEPS = 10
_OF_ONE_RANK = 10.0
"""How often the loss of the others a rank's must be, for the batch to be its own."""


def unusual_batch(case: Case) -> Iterator[Diagnosis]:
    """Yield the step with the worst batch whose loss and norm jumped and recovered."""
    found = [step for step in case.judged if _jumps(case, step) and _recovers(case, step)]
    if not found:
        return
    worst = max(found, key=norm_of)
    band = case.loss_band(worst.sequence)
    usual = median(map(norm_of, case.judged_before(worst.sequence, _BEFORE_STEPS)))
    text = (
        f"On step {worst.step} the loss was {worst.get('loss'):.3g} against a baseline of "
        f"{band[0] if band else 0.0:.3g}, and the gradient norm {norm_of(worst) / usual:.3g} times "
        "its usual value; the steps before it were normal."
    )
    rank = _single_rank(case, worst.sequence)
    arguments_for = [
        Argument(text, STRONG),
        Argument(f"Within {_RECOVERS_STEPS} steps the loss was back at its baseline.", MEDIUM),
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
        phase="forward",
        arguments_for=tuple(arguments_for),
        arguments_against=tuple(against),
    )


def _jumps(case: Case, step: MergedStep) -> bool:
    """Return whether loss and norm are far above what they were, and were not a step before."""
    loss, band = step.get("loss"), case.loss_band(step.sequence)
    earlier = case.judged_before(step.sequence, _BEFORE_STEPS)
    if loss is None or band is None or not earlier or loss <= band[1]:
        return False
    usual = median(map(norm_of, earlier))
    growth = case.limit("grad_norm_growth")
    last, last_loss = earlier[-1], earlier[-1].get("loss")
    calm = norm_of(last) < growth * usual and (last_loss is None or last_loss <= band[1])
    return calm and usual > 0 and norm_of(step) >= growth * usual


def _recovers(case: Case, step: MergedStep) -> bool:
    band = case.loss_band(step.sequence)
    after = [s for s in case.steps if 0 < s.sequence - step.sequence <= _RECOVERS_STEPS]
    losses = case.losses(after)
    return band is not None and bool(losses) and losses[-1] <= band[1]


def _rate_changes(case: Case, step: MergedStep) -> Iterator[float]:
    before = case.step_at(step.sequence - 1)
    rate, earlier = step.get("learning_rate"), before.get("learning_rate") if before else None
    if rate and earlier and rate > 2 * earlier:
        yield rate / earlier


def _single_rank(case: Case, sequence: int) -> int | None:
    """Return the rank whose loss is far above those of all others, if there is one."""
    losses = dict(_losses_at(case, sequence))
    if len(losses) < 2:
        return None
    worst = max(losses, key=lambda rank: losses[rank])
    others: Sequence[float] = [loss for rank, loss in losses.items() if rank != worst]
    return worst if losses[worst] > _OF_ONE_RANK * max(others) > 0 else None


def _losses_at(case: Case, sequence: int) -> Iterator[tuple[int, float]]:
    for log in case.evidence.ranks:
        for segment in log.segments:
            if "loss" not in segment.schema.step_columns:
                continue
            column = segment.schema.step_columns.index("loss")
            for record in segment.steps:
                if record.sequence == sequence and isfinite(record.values[column]):
                    yield log.identity.rank, float(record.values[column])
