"""Batches that are unusual, and how a run ended."""

from collections.abc import Iterator, Sequence
from statistics import median

from mp_agent.flight.postmortem.case import Case
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
from mp_agent.records.steps import EndReason, Phase

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
