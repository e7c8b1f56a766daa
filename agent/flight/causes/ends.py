"""Ends that are not the numbers' doing: killed ranks, errors, ranks that wait for others."""

from collections.abc import Iterator, Sequence
from statistics import median

from mp_agent.flight.case import Case
from mp_agent.flight.causes.nonfinite import ranks_text
from mp_agent.flight.findings import DECISIVE, MEDIUM, STRONG, WEAK, Argument, Causes, Diagnosis
from mp_agent.records.flight import RankLog
from mp_agent.records.steps import EndReason, Phase

_STALL_SECONDS_MIN = 60.0
_STALL_STEPS = "stall_steps"
_TRAINING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_NANOSECONDS = 1e9


def ends(case: Case) -> Iterator[Diagnosis]:
    """Yield how ranks ended, or that they stand still."""
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
        text = f"{_who(killed)} went without a word; the others said how they ended."
    elif len(killed) > 1:
        text = f"All {len(killed)} ranks went without a word."
    else:
        text = "The process went without a word: no error, no exit."
    speaks_for = [Argument(text, DECISIVE)]
    step = case.number_of(first.state.started_sequence)
    stood = f"{_who(behind)} stood in {first.state.phase_name} of step {step}"
    if not others and len(behind) < len(killed):
        speaks_for.append(Argument(f"{stood}, behind the others.", MEDIUM))
        return _at(case, Causes.RANK_KILLED, first, speaks_for, named=behind)
    speaks_for.append(Argument(f"{stood}.", WEAK))
    return _at(case, Causes.RANK_KILLED, first, speaks_for, named=killed if others else ())


def _failed(case: Case, failed: Sequence[RankLog]) -> Diagnosis:
    first = min(failed, key=lambda log: log.state.phase_unix_ns)
    text = f"{_who(failed)} ended with an error; the launcher's log holds the traceback."
    speaks_for = [Argument(text, DECISIVE)]
    if len(failed) < len(case.evidence.ranks):
        speaks_for.append(Argument("The other ranks did not fail by themselves.", WEAK))
    named = failed if len(failed) < case.world_size else ()
    return _at(case, Causes.RANK_FAILED, first, speaks_for, named=named)


def _stalled(case: Case, going: Sequence[RankLog]) -> Iterator[Diagnosis]:
    if len(case.steps) < 2 or not all(log.state.phase in _TRAINING for log in going):
        return
    seconds = [s for step in case.steps if (s := step.get("step_seconds"))]
    usual = median(seconds) if seconds else 0.0
    last_word = max(log.state.phase_unix_ns for log in going) / _NANOSECONDS
    silence = case.evidence.read_unix_seconds - last_word
    if silence < max(_STALL_SECONDS_MIN, case.limit(_STALL_STEPS) * usual):
        return
    lowest = min(map(_progress, going))
    behind = [log for log in going if _progress(log) == lowest]
    everybody = len(behind) == len(going)
    text = f"No rank has moved for {silence:.0f} s; a step usually takes {usual:.3g} s."
    speaks_for = [Argument(text, STRONG)]
    if not everybody:
        text = f"{_who(behind)} stood behind the others, in {behind[0].state.phase_name}."
        speaks_for.append(Argument(text, MEDIUM))
    yield _at(case, Causes.RANK_STALLED, behind[0], speaks_for, named=() if everybody else behind)


def _at(
    case: Case,
    cause: Causes,
    log: RankLog,
    speaks_for: Sequence[Argument],
    *,
    named: Sequence[RankLog],
) -> Diagnosis:
    """Return a finding at the place where a rank stood."""
    state = log.state
    # A rank that has ended stands in no phase any more.
    phase = "" if state.phase is Phase.ENDED else state.phase_name
    sequence = max(state.started_sequence, state.committed_sequence)
    return Diagnosis(
        cause=cause.value,
        sequence=sequence,
        step=case.number_of(sequence),
        rank=",".join(str(log.identity.rank) for log in named),
        phase=phase,
        speaks_for=tuple(speaks_for),
    )


def _who(logs: Sequence[RankLog]) -> str:
    return ranks_text(tuple(log.identity.rank for log in logs)).capitalize()


def _progress(log: RankLog) -> tuple[int, int]:
    return (log.state.started_sequence, int(log.state.phase))
