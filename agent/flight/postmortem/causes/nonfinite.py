"""Causes of NaN and Inf: their origin, and hardware."""

from collections.abc import Iterator

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
from mp_agent.flight.record.evidence import GpuError
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import FirstNonfinite


def nonfinite(case: Case) -> Iterator[Diagnosis]:
    """Yield where the latest incident originated, and what it did to the weights."""
    first = case.history.first_nonfinite
    step = case.step_at(case.history.first_nonfinite_sequence)
    if first is not None and step is not None:
        if first.phase == "backward":
            yield _from_backward(case, step, first)
        elif first.rank and len(step.present_ranks) > 1:
            yield _from_ranks(case, step, first)
        else:
            yield _from_forward(case, step)
    yield from _updates(case)


def _from_ranks(case: Case, step: MergedStep, first: FirstNonfinite) -> Diagnosis:
    blamed = step.nonfinite_loss_ranks
    others = len(step.present_ranks) - len(blamed)
    text = (
        f"On step {step.step} the loss of {ranks_text(blamed)} was NaN or Inf, and that of "
        f"{others} other(s) finite: observed before gradients were reduced."
    )
    return _finding(
        case,
        Causes.NONFINITE_ON_ONE_RANK,
        step,
        rank=first.rank,
        phase="forward",
        arguments=[Argument(text, DECISIVE), *_sudden(case, step)],
    )


def _from_forward(case: Case, step: MergedStep) -> Diagnosis:
    ranks = len(step.present_ranks)
    if ranks > 1:
        arguments = [
            Argument(
                f"On step {step.step} the loss of all {ranks} ranks was NaN or Inf at once.",
                STRONG,
            )
        ]
    else:
        arguments = [Argument(f"On step {step.step} the loss was NaN or Inf.", STRONG)]
    stuck = _skipped_nonfinite(case, step.sequence)
    if stuck > 1:
        arguments.append(
            Argument(
                f"The same happened on {stuck} skipped steps: the forward pass itself "
                "overflows, which no loss scale changes.",
                MEDIUM,
            )
        )
    if "fp16" in case.evidence.facts.get("precision", ""):
        arguments.append(
            Argument("The forward pass is in FP16, whose largest value is 65504.", WEAK)
        )
    arguments += _sudden(case, step)
    return _finding(case, Causes.NONFINITE_FORWARD, step, phase="forward", arguments=arguments)


def _from_backward(case: Case, step: MergedStep, first: FirstNonfinite) -> Diagnosis:
    elements = step.gradient_nonfinite_elements
    arguments = [
        Argument(
            f"On step {step.step} the loss was finite on all ranks, and {elements:.0f} gradient "
            "element(s) were NaN or Inf.",
            STRONG,
        )
    ]
    named = len(step.present_ranks) > 1 and first.rank
    if named:
        arguments += _own_gradients(case, step)
    if first.layer:
        arguments.append(
            Argument(
                f"Of the layers affected, {first.layer} is nearest to the output, where backward "
                "begins.",
                MEDIUM,
            )
        )
    arguments += _sudden(case, step)
    return _finding(
        case,
        Causes.NONFINITE_BACKWARD,
        step,
        rank=first.rank if named else "",
        layer=first.layer,
        phase="backward",
        arguments=arguments,
    )


def _own_gradients(case: Case, first: MergedStep) -> Iterator[Argument]:
    """Yield whose own gradients were not finite, on the first step on which that was measured."""
    for step in case.steps:
        blamed = step.nonfinite_gradient_ranks
        if step.sequence < first.sequence or not blamed or step.flag("loss_nonfinite"):
            continue
        others = len(step.present_ranks) - len(blamed)
        when = "" if step is first else f"on step {step.step}, where they were first measured, "
        text = (
            f"Of the ranks' own gradients, {when}those of {ranks_text(blamed)} were NaN or Inf, "
            f"and those of {others} other(s) finite: observed before they were reduced."
        )
        yield Argument(text, DECISIVE if step is first else STRONG)
        return


def _updates(case: Case) -> Iterator[Diagnosis]:
    updates = [
        step
        for step in case.steps
        if not step.weights_kept and step.gradient_nonfinite_elements > 0
    ]
    if not updates:
        return
    first = updates[0]
    arguments = [
        Argument(
            f"From step {first.step} on, {len(updates)} step(s) of the optimizer used NaN or Inf "
            "gradients; the weights they updated are lost.",
            STRONG,
        )
    ]
    if not case.has_scaler:
        arguments.append(Argument("There is no GradScaler that would skip such steps.", MEDIUM))
    yield _finding(case, Causes.NONFINITE_UPDATE, first, phase="optimizer", arguments=arguments)


def _sudden(case: Case, step: MergedStep) -> list[Argument]:
    """Return the argument that gradients were normal before, if they were."""
    earlier = case.judged_before(step.sequence, 20)
    if not earlier or max(map(norm_of, earlier)) > case.limit("grad_norm_high"):
        return []
    last = earlier[-1]
    return [
        Argument(
            f"The gradients were normal until then: norm {norm_of(last):.3g} on step {last.step}.",
            WEAK,
        )
    ]


def _skipped_nonfinite(case: Case, sequence: int) -> int:
    return sum(
        step.weights_kept and step.flag("loss_nonfinite")
        for step in case.steps
        if step.sequence >= sequence
    )


def _finding(
    case: Case,
    cause: Causes,
    step: MergedStep,
    *,
    arguments: list[Argument],
    rank: str = "",
    layer: str = "",
    phase: str = "",
) -> Diagnosis:
    return Diagnosis(
        cause=cause.value,
        sequence=step.sequence,
        step=step.step,
        rank=rank,
        layer=layer,
        phase=phase,
        arguments_for=tuple(arguments),
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks as text."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


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
