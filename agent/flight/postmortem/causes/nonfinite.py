"""NaN and Inf: first seen in the forward pass of some ranks, of all ranks, or in backward."""

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
