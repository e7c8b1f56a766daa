"""How a run ended: its batches, its exit, and parameters that were not trained."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from statistics import median

from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.causes.nonfinite import ranks_text
from mp_agent.flight.postmortem.diagnosis import (
    DECISIVE,
    MEDIUM,
    STRONG,
    WEAK,
    Argument,
    Causes,
    Diagnosis,
)
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import EndReason, Phase

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


_TRAINING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_NANOSECONDS = 1e9


def ends(case: Case) -> Iterator[Diagnosis]:
    """Yield how ranks ended, or that they stalled."""
    ranks = case.evidence.ranks
    killed = [log for log in ranks if log.end is EndReason.KILLED]
    failed = [log for log in ranks if log.end is EndReason.FAILED]
    if killed:
        yield _killed(case, killed)
    if failed:
        yield _failed(case, failed)
    going = [log for log in ranks if log.end is EndReason.RUNNING]
    if going and not killed and not failed:
        yield from _stalled(case, going)


def _killed(case: Case, killed: Sequence[RankLog]) -> Diagnosis:
    others = [log for log in case.evidence.ranks if log.end is not EndReason.KILLED]
    first = min(killed, key=_progress)
    behind = [log for log in killed if _progress(log) == _progress(first)]
    if others:
        text = f"{_who(killed)} vanished without reporting an end; the others reported theirs."
    elif len(killed) > 1:
        text = f"All {len(killed)} ranks vanished without reporting an end."
    else:
        text = "The process vanished without reporting an end: no error, no exit."
    arguments_for = [Argument(text, DECISIVE)]
    step = case.number_of(first.state.started_sequence)
    position = f"{_who(behind)} stopped in {first.state.phase_name} of step {step}"
    if not others and len(behind) < len(killed):
        arguments_for.append(Argument(f"{position}, behind the others.", MEDIUM))
        return _at(case, Causes.RANK_KILLED, first, arguments_for, named=behind)
    arguments_for.append(Argument(f"{position}.", WEAK))
    return _at(case, Causes.RANK_KILLED, first, arguments_for, named=killed if others else ())


def _failed(case: Case, failed: Sequence[RankLog]) -> Diagnosis:
    first = min(failed, key=lambda log: log.state.phase_unix_ns)
    text = f"{_who(failed)} ended with an error; the launcher's log holds the traceback."
    arguments_for = [Argument(text, DECISIVE)]
    if len(failed) < len(case.evidence.ranks):
        arguments_for.append(Argument("The other ranks did not fail on their own.", WEAK))
    named = failed if len(failed) < case.world_size else ()
    return _at(case, Causes.RANK_FAILED, first, arguments_for, named=named)


def _stalled(case: Case, going: Sequence[RankLog]) -> Iterator[Diagnosis]:
    if len(case.steps) < 2 or not all(log.state.phase in _TRAINING for log in going):
        return
    seconds = [s for step in case.steps if (s := step.get("step_seconds"))]
    usual = median(seconds) if seconds else 0.0
    last_change = max(log.state.phase_unix_ns for log in going) / _NANOSECONDS
    silence = case.evidence.read_unix_seconds - last_change
    if silence < max(case.seconds("rank_stall_window"), case.limit("stall_steps") * usual):
        return
    lowest = min(map(_progress, going))
    behind = [log for log in going if _progress(log) == lowest]
    all_behind = len(behind) == len(going)
    text = f"No rank has made progress for {silence:.0f} s; a step usually takes {usual:.3g} s."
    arguments_for = [Argument(text, STRONG)]
    if not all_behind:
        text = f"{_who(behind)} stopped behind the others, in {behind[0].state.phase_name}."
        arguments_for.append(Argument(text, MEDIUM))
    yield _at(
        case, Causes.RANK_STALLED, behind[0], arguments_for, named=() if all_behind else behind
    )


def _at(
    case: Case,
    cause: Causes,
    log: RankLog,
    arguments_for: Sequence[Argument],
    *,
    named: Sequence[RankLog],
) -> Diagnosis:
    """Return a diagnosis at the point where a rank stopped."""
    state = log.state
    # A rank that has ended is in no phase.
    phase = "" if state.phase is Phase.ENDED else state.phase_name
    sequence = max(state.started_sequence, state.committed_sequence)
    return Diagnosis(
        cause=cause.value,
        sequence=sequence,
        step=case.number_of(sequence),
        rank=",".join(str(log.identity.rank) for log in named),
        phase=phase,
        arguments_for=tuple(arguments_for),
    )


def _who(logs: Sequence[RankLog]) -> str:
    return ranks_text(tuple(log.identity.rank for log in logs)).capitalize()


def _progress(log: RankLog) -> tuple[int, int]:
    return (log.state.started_sequence, int(log.state.phase))


def untrained(case: Case) -> Iterator[Diagnosis]:
    """Yield that the run ended with steps that could not change the weights."""
    with_rate = [step for step in case.steps if step.get("learning_rate") is not None]
    still = _at_the_end(with_rate, lambda step: step.get("learning_rate") == 0.0)
    if still and len(still) >= case.limit("untrained_steps"):
        text = f"The learning rate was 0 on the last {len(still)} steps."
        earlier = with_rate[: -len(still)]
        yield _finding(Causes.LEARNING_RATE_ZERO, still, text, _had_ended(earlier))
    zero = _at_the_end(case.judged, lambda step: norm_of(step) == 0.0)
    if zero and len(zero) >= case.limit("untrained_steps"):
        text = f"All gradients were exactly 0 on the last {len(zero)} steps."
        yield _finding(Causes.ZERO_GRADIENTS, zero, text, _zero_losses(case, zero))
        return
    yield from _constant_loss(case)


def _constant_loss(case: Case) -> Iterator[Diagnosis]:
    """Yield that the loss was the same at the end, as were the norms or after losses above 0."""
    observed = [step for step in case.judged if step.get("loss") is not None]
    if not observed:
        return
    last = observed[-1].get("loss")
    same = _at_the_end(observed, lambda step: step.get("loss") == last)
    earlier = case.losses(observed[: -len(same)])
    one_norm = len({norm_of(step) for step in same}) == 1
    vanished = last == 0.0 and bool(earlier) and min(earlier) > 0.0
    if len(same) < case.limit("untrained_steps") or not (one_norm or vanished):
        return
    text = f"The loss was exactly {last:.4g} on the last {len(same)} steps."
    yield _finding(Causes.CONSTANT_LOSS, same, text, _one_norm(same, one_norm=one_norm))


def _one_norm(steps: Sequence[MergedStep], *, one_norm: bool) -> Iterator[Argument]:
    if one_norm:
        text = f"So was the gradient norm: {norm_of(steps[0]):.4g} on every step."
        yield Argument(text, MEDIUM)


def _at_the_end(
    steps: Sequence[MergedStep], holds: Callable[[MergedStep], bool]
) -> list[MergedStep]:
    found: list[MergedStep] = []
    for step in reversed(steps):
        if not holds(step):
            break
        found.append(step)
    return found[::-1]


def _finding(
    cause: Causes, steps: Sequence[MergedStep], text: str, more: Iterator[Argument]
) -> Diagnosis:
    arguments = [Argument(text, STRONG + MEDIUM), *more]
    return Diagnosis(
        cause=cause.value,
        sequence=steps[0].sequence,
        step=steps[0].step,
        phase="optimizer" if cause is Causes.LEARNING_RATE_ZERO else "backward",
        arguments_for=tuple(a for a in arguments if a.weight > 0),
        arguments_against=tuple(Argument(a.text, -a.weight) for a in arguments if a.weight < 0),
    )


def _had_ended(earlier: Sequence[MergedStep]) -> Iterator[Argument]:
    rates = [step.get("learning_rate") or 0.0 for step in earlier]
    if not rates:
        yield Argument("No earlier step is kept: it may be the beginning of a warm-up.", -MEDIUM)
    elif rates[-1] < max(rates):
        text = f"It had fallen from {max(rates):.3g}: the schedule ended before the run."
        yield Argument(text, MEDIUM)


def _zero_losses(case: Case, zero: Sequence[MergedStep]) -> Iterator[Argument]:
    losses = case.losses(zero)
    if losses and max(losses) == 0.0:
        yield Argument("The loss was exactly 0 as well: labels may be masked.", MEDIUM)
    elif losses and min(losses) < max(losses):
        text = "The loss was not 0 and still varied: the output is detached from the parameters."
        yield Argument(text, WEAK)
