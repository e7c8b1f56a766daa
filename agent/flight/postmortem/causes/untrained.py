"""Steps that train nothing: a rate or gradients of exactly 0, or a loss that no longer changes."""

from collections.abc import Callable, Iterator, Sequence

from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.diagnosis import MEDIUM, STRONG, WEAK, Argument, Causes, Diagnosis
from mp_agent.records.merged import MergedStep


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
