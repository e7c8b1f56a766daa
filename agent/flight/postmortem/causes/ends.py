"""Batches that are unusual, and how a run ended."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
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

_RECOVERS_STEPS = 10
_OF_ONE_RANK = 10.0
"""How often the loss of the others a rank's must be, for the batch to be its own."""


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
    rank = _single_rank(case, worst.sequence)
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
