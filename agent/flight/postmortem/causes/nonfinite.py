"""Where NaN and Inf came from: the step, the ranks, the layer, the pass; and the hardware."""

from collections.abc import Iterator, Sequence

from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.diagnosis import (
    ALERTING,
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

_CALM_STEPS = 20
_FIRST_STEPS = 100
"""In which second moments that round to 0 show, if there are any."""
OF_THE_ORIGIN = ("MpAgentRankNonFinite", "MpAgentLossNonFinite", "MpAgentGradientNonFinite")
"""Conditions that where an incident began explains."""


def nonfinite(case: Case) -> Iterator[Diagnosis]:
    """Yield where the latest incident originated."""
    first, step = case.history.first_nonfinite, case.origin
    if first is None or step is None:
        return
    yield from _zero_epsilon(case, step)
    several = len(step.present_ranks) > 1
    if first.phase == "backward":
        cause, arguments = Causes.NONFINITE_BACKWARD, _from_backward(case, step, first.layer)
    elif first.rank and several:
        cause, arguments = Causes.NONFINITE_ON_ONE_RANK, _from_ranks(step)
    else:
        cause, arguments = Causes.NONFINITE_FORWARD, _from_forward(case, step)
    yield Diagnosis(
        cause=cause.value,
        sequence=step.sequence,
        step=step.step,
        rank=first.rank if several else "",
        layer=first.layer,
        phase=cause.value.phase,
        arguments_for=(*arguments, *_sudden(case, step)),
        alerts=tuple(
            one.name
            for one in case.conditions
            if one.name in OF_THE_ORIGIN and one.severity in ALERTING
        ),
    )


def _zero_epsilon(case: Case, step: MergedStep) -> Iterator[Diagnosis]:
    """Yield that an update can have written NaN or Inf without any in gradients or loss."""
    facts = case.evidence.facts
    if optimizer := facts.get("zero_epsilon_optimizer"):
        text = (
            f"{optimizer} keeps its state in FP16, which rounds its epsilon of "
            f"{facts['zero_epsilon']} to 0: where a second moment rounds to 0 too, the update is "
            "NaN or Inf."
        )
        yield Diagnosis(
            cause=Causes.ZERO_EPSILON.value,
            sequence=step.sequence,
            step=step.step,
            phase=Causes.ZERO_EPSILON.value.phase,
            arguments_for=(Argument(text, DECISIVE if step.sequence <= _FIRST_STEPS else MEDIUM),),
        )


def _from_ranks(step: MergedStep) -> Iterator[Argument]:
    blamed = step.nonfinite_loss_ranks
    others = len(step.present_ranks) - len(blamed)
    yield Argument(
        f"On step {step.step} the loss of {ranks_text(blamed)} was NaN or Inf, and that of "
        f"{others} other(s) finite: observed before gradients were reduced.",
        DECISIVE,
    )


def _from_forward(case: Case, step: MergedStep) -> Iterator[Argument]:
    ranks = len(step.present_ranks)
    who = f"the loss of all {ranks} ranks was NaN or Inf at once" if ranks > 1 else ""
    yield Argument(f"On step {step.step} {who or 'the loss was NaN or Inf'}.", STRONG)
    stuck = sum(s.weights_kept and s.flag("loss_nonfinite") for s in case.since(step.sequence))
    if stuck > 1:
        text = (
            f"The same happened on {stuck} skipped steps: the forward pass itself overflows, which "
            "no loss scale changes."
        )
        yield Argument(text, MEDIUM)
    if case.in_fp16:
        text = "The forward pass is in FP16, whose largest value is 65504."
        yield Argument(text, WEAK)


def _from_backward(case: Case, step: MergedStep, layer: str) -> Iterator[Argument]:
    yield Argument(
        f"On step {step.step} the loss was finite on all ranks, and "
        f"{step.gradient_nonfinite_elements:.0f} gradient element(s) were NaN or Inf.",
        STRONG,
    )
    if len(step.present_ranks) > 1:
        yield from _own_gradients(case, step)
    if layer:
        text = (
            f"Of the layers affected, {layer} is nearest to the output, where backward begins, or "
            "made them."
        )
        yield Argument(text, MEDIUM)


def _own_gradients(case: Case, first: MergedStep) -> Iterator[Argument]:
    """Yield whose own gradients were not finite, on the first step on which that was measured."""
    for step in case.since(first.sequence):
        blamed = step.nonfinite_gradient_ranks
        if not blamed or step.flag("loss_nonfinite"):
            continue
        others = len(step.present_ranks) - len(blamed)
        when = "" if step is first else f"on step {step.step}, where they were first measured, "
        text = (
            f"Of the ranks' own gradients, {when}those of {ranks_text(blamed)} were NaN or Inf, "
            f"and those of {others} other(s) finite: observed before they were reduced."
        )
        yield Argument(text, DECISIVE if step is first else STRONG)
        return


def _sudden(case: Case, step: MergedStep) -> Iterator[Argument]:
    """Yield that gradients were normal before, if they were."""
    earlier = [s for s in case.judged if s.sequence < step.sequence][-_CALM_STEPS:]
    if earlier and not any(case.usual(s).exploded for s in earlier):
        norm, number = norm_of(earlier[-1]), earlier[-1].step
        text = f"The gradients were normal until then: norm {norm:.3g} on step {number}."
        yield Argument(text, WEAK)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


_NEAR_SECONDS = 600.0


def gpu_errors(case: Case) -> Iterator[Diagnosis]:
    """Yield the errors of GPUs that came before the end of the run and not long before it."""
    near = [error for error in case.evidence.gpu_errors if _is_near(case, error)]
    if not near:
        return
    first = next((error for error in near if error.of_hardware), near[0])
    against = []
    if not any(error.of_hardware for error in near):
        text = "Programs cause these errors too, by an illegal access or when they are stopped."
        against.append(Argument(text, MEDIUM))
    if first.time_unix_seconds is None:
        against.append(Argument("It is not known when: it may be older than the run.", MEDIUM))
    sequence = _sequence_at(case, first)
    yield Diagnosis(
        cause=Causes.GPU_ERROR.value,
        sequence=sequence,
        step=case.number_of(sequence),
        arguments_for=tuple(map(_reported, (first, *(e for e in near if e is not first)))),
        arguments_against=tuple(against),
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
    moment = error.time_unix_seconds
    later = (s for s in case.steps if moment is None or s.time_unix_seconds >= moment)
    return next(later, case.steps[-1]).sequence if case.steps else 0
