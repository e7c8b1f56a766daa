"""Causes of a run that diverged: an explosion, the learning rate, the loss."""

from collections.abc import Iterator, Sequence
from statistics import median

from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.diagnosis import MEDIUM, STRONG, WEAK, Argument, Causes, Diagnosis
from mp_agent.records.merged import MergedStep

_EPISODE_GAP_STEPS = 50
"""Steps below the limit after which a norm above it starts another episode."""
_AFTER_STEPS = 5
_START_STEPS = 10


def explosion(case: Case) -> Iterator[Diagnosis]:
    """Yield the worst episode of norms above the limit."""
    high = case.limit("grad_norm_high")
    episodes = _episodes([step for step in case.judged if norm_of(step) > high])
    if not episodes:
        return
    worst = max(episodes, key=lambda steps: max(map(norm_of, steps)))
    first = worst[0]
    layer, share = _largest_layer(case, first.sequence)
    arguments_for = [*_size(case, worst), *_growth(case, worst), *_loss_rises(case, worst)]
    if layer:
        arguments_for.append(
            Argument(f"Layer {layer} holds {share:.0%} of the squared norm there.", WEAK)
        )
    if not any(_clipped(step) for step in worst):
        arguments_for.append(Argument("Nothing clipped these gradients.", WEAK))
    yield Diagnosis(
        cause=Causes.GRADIENT_EXPLOSION.value,
        sequence=first.sequence,
        step=first.step,
        layer=layer,
        phase="backward",
        arguments_for=tuple(arguments_for),
        arguments_against=tuple(_against(case, worst)),
    )


def _episodes(above: Sequence[MergedStep]) -> list[list[MergedStep]]:
    episodes: list[list[MergedStep]] = []
    for step in above:
        if episodes and step.sequence - episodes[-1][-1].sequence <= _EPISODE_GAP_STEPS:
            episodes[-1].append(step)
        else:
            episodes.append([step])
    return episodes


def _size(case: Case, episode: Sequence[MergedStep]) -> Iterator[Argument]:
    high, extreme = case.limit("grad_norm_high"), case.limit("grad_norm_extreme")
    largest = max(map(norm_of, episode))
    wrecking = sum(norm_of(step) > extreme for step in episode)
    if wrecking:
        text = (
            f"The gradient norm was above {extreme:g} on {wrecking} step(s), {largest:.3g} at most."
        )
        yield Argument(text, STRONG)
    yield Argument(
        f"It was above {high:g} on {len(episode)} step(s), from step {episode[0].step} on.",
        MEDIUM if len(episode) > 1 else WEAK,
    )


def _growth(case: Case, episode: Sequence[MergedStep]) -> Iterator[Argument]:
    usual = _usual_before(case, episode)
    largest = max(map(norm_of, episode))
    if usual > 0 and largest >= case.limit("grad_norm_growth") * usual:
        text = f"It grew {largest / usual:.3g}-fold from {usual:.3g}, the median before."
        yield Argument(text, MEDIUM)


def _usual_before(case: Case, episode: Sequence[MergedStep]) -> float:
    """Return the median norm before an episode; of its own first steps if none precede it."""
    earlier = case.judged_before(episode[0].sequence, 50) or episode[:_START_STEPS]
    return median(map(norm_of, earlier)) if earlier else 0.0


def _loss_rises(case: Case, episode: Sequence[MergedStep]) -> Iterator[Argument]:
    band = case.loss_band(episode[0].sequence)
    after = case.losses([step for step in case.steps if step.sequence >= episode[0].sequence])
    if band and after and median(after[-_AFTER_STEPS:]) > band[1]:
        risen = median(after[-_AFTER_STEPS:])
        yield Argument(f"The loss left its baseline of {band[0]:.3g}, to {risen:.3g}.", MEDIUM)
    first = episode[0].sequence
    if any(step.flag("loss_nonfinite") for step in case.steps if step.sequence > first):
        yield Argument("Afterwards the loss was NaN or Inf.", WEAK)


def _against(case: Case, episode: Sequence[MergedStep]) -> Iterator[Argument]:
    if all(_clipped(step) for step in episode):
        limit = episode[0].get("clip_max_norm") or 0.0
        yield Argument(f"All of these steps were clipped to {limit:g}.", STRONG)
        if not any(_loss_rises(case, episode)):
            yield Argument("The loss stayed within its baseline.", STRONG)
    usual = _usual_before(case, episode)
    largest = max(map(norm_of, episode))
    if usual > 0 and largest < case.limit("grad_norm_growth") * usual:
        text = f"The usual norm of this run is {usual:.3g}: such norms are normal for it."
        yield Argument(text, STRONG + MEDIUM + WEAK)
    early = episode[0].sequence <= _START_STEPS
    if early and norm_of(case.judged[-1]) <= case.limit("grad_norm_high"):
        text = "It happened in the first steps of training; the norm then fell below the limit."
        yield Argument(text, STRONG + MEDIUM)


def _clipped(step: MergedStep) -> bool:
    return (step.clip_coefficient or 1.0) < 1.0


def _largest_layer(case: Case, sequence: int) -> tuple[str, float]:
    """Return the layer with the largest norm, and its share of the squared norm."""
    table = case.layers_at(sequence)
    if table is None or not table.names:
        return "", 0.0
    squares = table.column("sum_squares")
    index, total = int(squares.argmax()), float(squares.sum())
    return (table.names[index], float(squares[index]) / total) if total > 0 else ("", 0.0)


_WARM_UP_STEPS = 100
"""As in the node agent: any rise during warm-up is normal."""
_BEFORE_MIN = 10
_AFTER_CHANGE_STEPS = 50


def learning_rate(case: Case) -> Iterator[Diagnosis]:
    """Yield the first step whose learning rate was far above all that were kept before it."""
    highest, seen = 0.0, 0
    for step in case.steps:
        rate = step.get("learning_rate")
        if rate is None:
            continue
        settled = seen >= _BEFORE_MIN and step.sequence > _WARM_UP_STEPS
        if settled and highest > 0.0 and rate >= case.limit("learning_rate_jump") * highest:
            yield _jump(case, step, highest, rate)
            return
        highest, seen = max(highest, rate), seen + 1


def _jump(case: Case, step: MergedStep, highest: float, rate: float) -> Diagnosis:
    text = f"The learning rate rose from {highest:.3g} to {rate:.3g}, {rate / highest:.3g}-fold."
    arguments_for = [Argument(text, STRONG)]
    after = [s for s in case.steps if 0 <= s.sequence - step.sequence <= _AFTER_CHANGE_STEPS]
    band = case.loss_band(step.sequence)
    losses = case.losses(after)
    if band and losses and max(losses) > band[1]:
        text = f"The loss then left its baseline of {band[0]:.3g}, to {max(losses):.3g}."
        arguments_for.append(Argument(text, MEDIUM))
    elif any(s.flag("loss_nonfinite") for s in after):
        arguments_for.append(Argument("The loss then was NaN or Inf.", MEDIUM))
    if any(s.gradient_nonfinite_elements > 0 for s in after):
        arguments_for.append(Argument("Gradients then were NaN or Inf.", WEAK))
    return Diagnosis(
        cause=Causes.LEARNING_RATE_JUMP.value,
        sequence=step.sequence,
        step=step.step,
        phase="optimizer",
        arguments_for=tuple(arguments_for),
    )


_RISEN_MIN = 5
_FACTOR = 1.2


def diverging_loss(case: Case) -> Iterator[Diagnosis]:
    """Yield that the loss ended above what it was in the first half of the record."""
    observed = [step for step in case.steps if step.get("loss") is not None]
    if not observed:
        return
    middle = observed[len(observed) // 2].sequence
    band = case.loss_band(middle)
    if band is None:
        return
    usual, limit = band
    risen = []
    for step in reversed(observed):
        loss = step.get("loss") or 0.0
        if loss <= limit or loss <= usual + (_FACTOR - 1.0) * abs(usual):
            break
        risen.append(step)
    if len(risen) < _RISEN_MIN:
        return
    first = risen[-1]
    last = median(case.losses(risen[:_RISEN_MIN]))
    text = (
        f"The loss was {last:.3g} at the end, above its baseline of {usual:.3g} (bound: "
        f"{limit:.3g}) on the last {len(risen)} steps."
    )
    arguments_for = [Argument(text, MEDIUM)]
    if len(risen) >= case.limit("loss_lost_steps"):
        arguments_for.append(Argument("It did not recover.", WEAK))
    yield Diagnosis(
        cause=Causes.LOSS_DIVERGING.value,
        sequence=first.sequence,
        step=first.step,
        phase="forward",
        arguments_for=tuple(arguments_for),
    )
