"""Hardware: errors of a GPU, and replicas that are not equal, for whatever reason."""

from collections.abc import Iterator

from mp_agent.flight.postmortem.case import Case
from mp_agent.flight.postmortem.diagnosis import (
    DECISIVE,
    MEDIUM,
    STRONG,
    WEAK,
    Argument,
    Causes,
    Diagnosis,
)
from mp_agent.flight.record.gpu_errors import GpuError

_NEAR_SECONDS = 600.0
_NAMED_AT_MOST = 8
_LOST_STEPS = 3
"""Steps on which no two ranks have the gradients that a wrapper says are the same."""


def gpu_errors(case: Case) -> Iterator[Diagnosis]:
    """Yield the errors of GPUs that came before the end of the run and not long before it."""
    near = [error for error in case.evidence.gpu_errors if _is_near(case, error)]
    if not near:
        return
    first = next((error for error in near if error.of_hardware), near[0])
    arguments_for = [_reported(error) for error in (first, *(e for e in near if e is not first))]
    sequence = _sequence_at(case, first)
    against = []
    if not any(error.of_hardware for error in near):
        text = "Programs cause these errors too, by an illegal access or when they are stopped."
        against.append(Argument(text, MEDIUM))
    if first.time_unix_seconds is None:
        against.append(Argument("It is not known when: it may be older than the run.", MEDIUM))
    yield Diagnosis(
        cause=Causes.GPU_ERROR.value,
        sequence=sequence,
        step=case.number_of(sequence),
        arguments_for=tuple(arguments_for),
        arguments_against=tuple(against),
    )


def never_reduced(case: Case) -> Iterator[Diagnosis]:
    """Yield the first of the steps, up to the last one, whose gradients no collective reduced."""
    compared = [step for step in case.steps if step.reduction is not None and not step.skipped]
    reduced = [
        at for at, step in enumerate(compared) if step.reduction and not step.reduction.apart
    ]
    apart = compared[reduced[-1] if reduced else 0 :]
    if reduced and not (apart[0].reduction and apart[0].reduction.parts):
        del apart[0]
    contradicted = sum(step.reduction.contradicted for step in apart if step.reduction)
    if not apart or (len(apart) < case.limit("unreduced_steps") and contradicted < _LOST_STEPS):
        return
    first, ranks = apart[0], case.world_size
    arguments_for = [
        Argument(
            f"On {len(apart)} consecutive step(s), up to the last one, the {ranks} ranks stepped "
            "each with its own gradients, and their weights were not equal again.",
            DECISIVE,
        )
    ]
    if contradicted:
        text = "A wrapper is there to reduce them; its forward pass may have been bypassed."
        arguments_for.append(Argument(text, MEDIUM))
    yield Diagnosis(
        cause=Causes.NEVER_REDUCED.value,
        sequence=first.sequence,
        step=first.step,
        phase="backward",
        arguments_for=tuple(arguments_for),
    )


def replica_divergence(case: Case) -> Iterator[Diagnosis]:
    """Yield the first step on which replicas were compared and were not equal."""
    apart = [s for s in case.steps if any(not c.agree for c in s.replicas.values())]
    if not apart:
        return
    first = apart[0]
    kind = next(name for name, found in first.replicas.items() if not found.agree)
    ranks, tensors = first.replicas[kind].minority_ranks, first.replicas[kind].tensors
    named = f"rank {', '.join(map(str, ranks))}" if ranks else "single ranks"
    arguments_for = [
        Argument(f"On step {first.step} the {kind} of {named} differed from the others.", DECISIVE),
        Argument(f"They differed on {len(apart)} step(s).", WEAK),
    ]
    if tensors:
        text = f"Only {', '.join(tensors[:_NAMED_AT_MOST])} differed."
        arguments_for.append(Argument(text, WEAK))
    yield Diagnosis(
        cause=Causes.REPLICA_DIVERGENCE.value,
        sequence=first.sequence,
        step=first.step,
        rank=",".join(map(str, ranks)),
        phase="optimizer",
        arguments_for=tuple(arguments_for),
    )


def _reported(error: GpuError) -> Argument:
    weight = DECISIVE + MEDIUM if error.of_hardware else STRONG
    return Argument(f"{error.source} reports XID {error.xid} of GPU {error.gpu}.", weight)


def _is_near(case: Case, error: GpuError) -> bool:
    """Return whether an error belongs to the time of the record; if it has no time, it may."""
    if error.time_unix_seconds is None or not case.steps:
        return True
    first, last = case.steps[0].time_unix_seconds, case.steps[-1].time_unix_seconds
    return first - _NEAR_SECONDS <= error.time_unix_seconds <= last + _NEAR_SECONDS


def _sequence_at(case: Case, error: GpuError) -> int:
    """Return the step that was under way at the time; the first one kept if it is not known."""
    if not case.steps:
        return 0
    if error.time_unix_seconds is None:
        return case.steps[0].sequence
    moment = error.time_unix_seconds
    later = (step for step in case.steps if step.time_unix_seconds >= moment)
    return next(later, case.steps[-1]).sequence
