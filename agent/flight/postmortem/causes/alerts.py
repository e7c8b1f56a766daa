"""Causes that the conditions of a run show, with what else its steps say of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from statistics import median

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import Severity
from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.causes.nonfinite import OF_THE_ORIGIN
from mp_agent.flight.postmortem.causes.ranks import apart, apart_begin, not_reduced
from mp_agent.flight.postmortem.diagnosis import (
    ALERTING,
    MEDIUM,
    STRONG,
    WEAK,
    Argument,
    Cause,
    Causes,
    Diagnosis,
    LayerSample,
)
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.merged import MergedStep
from mp_agent.records.schema import UNHELD
from mp_agent.records.steps import EndReason

_WEIGHTS = {
    Severity.CRITICAL.value: STRONG + MEDIUM,
    Severity.WARNING.value: STRONG,
    Severity.INFO.value: WEAK,
}
_SUMMARIES = {condition.name: condition.summary for condition in CONDITIONS}
_BY_CONDITION = {name: cause for cause in reversed(Causes) for name in cause.value.signs}
_BY_REASON = {
    "learning rate 0": Causes.LEARNING_RATE_ZERO,
    "constant loss": Causes.CONSTANT_LOSS,
    "constant loss and gradient norm": Causes.CONSTANT_LOSS,
    "loss 0": Causes.CONSTANT_LOSS,
    "loss 0 at once": Causes.CONSTANT_LOSS,
}
"""What MpAgentNothingTrained shows by the reason that it gives, unless it is the gradients."""
_WITHOUT_GRADIENTS = "MpAgentLayersWithoutGradient"
_WITHOUT_OPTIMIZER = "MpAgentParametersWithoutOptimizer"


def alerts(case: Case) -> Iterator[Diagnosis]:
    """Yield a diagnosis for each cause that the conditions show; each condition shows one."""
    risen = _risen(case)
    shown: dict[Cause, list[ActiveCondition]] = {Causes.LOSS_DIVERGING.value: []} if risen else {}
    if apart(case):
        shown[Causes.NEVER_REDUCED.value] = []
    if _emptied(case):
        shown[Causes.GRADIENT_UNDERFLOW.value] = []
    for condition in case.conditions:
        if (cause := _cause_of(case, condition, risen=bool(risen))) is not None:
            shown.setdefault(cause, []).append(condition)
    for cause, own in shown.items():
        yield _diagnosis(case, cause, own)


def _cause_of(case: Case, condition: ActiveCondition, *, risen: bool) -> Cause | None:
    """Return what a condition shows; None where another diagnosis is about it.

    risen: whether the loss ended above its bound, so that a spike was the begin of more.
    """
    name = condition.name
    if name in OF_THE_ORIGIN and case.origin is not None:
        return None
    if name == _WITHOUT_OPTIMIZER and any(
        one.severity in ALERTING and _shows_none(one) for one in case.conditions
    ):
        # These are the tensors that the optimizer should hold instead: one fault, seen twice.
        return Causes.WITHOUT_GRADIENTS.value
    if _shows_none(condition):
        return Causes.WITHOUT_GRADIENTS.value
    if name == "MpAgentNothingTrained":
        reasons = (r for r in _BY_REASON if condition.description.endswith(f": {r}."))
        return _BY_REASON.get(next(reasons, ""), Causes.ZERO_GRADIENTS).value
    if name == "MpAgentGradientExplosion" and _contained(case, condition):
        return Causes.CONTAINED_EXPLOSION.value
    if name == "MpAgentRunFailed" and any(e.end is EndReason.KILLED for e in case.evidence.ranks):
        return Causes.RANK_KILLED.value
    if name == "MpAgentLossSpike" and risen:
        return Causes.LOSS_DIVERGING.value
    if name in _BY_CONDITION:
        return _BY_CONDITION[name].value
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in name.removeprefix("MpAgent"))
    return Cause(words.lstrip("_"), _SUMMARIES[name].removesuffix("."), (name,))


def _shows_none(condition: ActiveCondition) -> bool:
    """Return whether a condition says that the tensors of an optimizer get no gradients."""
    none_at_all = condition.description.endswith(": no gradients.")
    nothing_trained = condition.name == "MpAgentNothingTrained"
    return condition.name == _WITHOUT_GRADIENTS or (nothing_trained and none_at_all)


def _diagnosis(case: Case, cause: Cause, shown: Sequence[ActiveCondition]) -> Diagnosis:
    sequences = [case.sequence_of(condition.since_step) for condition in shown]
    begin, look, place = _LOOKS.get(cause, (_as_it_is, _nothing_more, _nowhere))
    sequence = begin(case, min(sequences, default=0))
    worst = sorted(shown, key=lambda condition: -_WEIGHTS[condition.severity])
    details = list(look(case, sequence))
    reported = [
        Argument(one.description, WEAK if number else _WEIGHTS[one.severity])
        for number, one in enumerate(worst)
    ]
    rank, layer = place(case, sequence)
    return Diagnosis(
        cause=cause,
        sequence=sequence,
        step=case.number_of(sequence),
        rank=rank or next((one.rank for one in shown if one.rank), ""),
        layer=layer or next((one.layer for one in shown if one.layer), ""),
        phase=_phase(case, cause, sequence),
        arguments_for=(*(a for a in details if a.weight > 0), *reported),
        arguments_against=tuple(Argument(a.text, -a.weight) for a in details if a.weight < 0),
        alerts=tuple(one.name for one in worst if one.severity in ALERTING),
    )


def _phase(case: Case, cause: Cause, sequence: int) -> str:
    at = case.step_at(sequence)
    overflow = cause in (Causes.LOSS_SCALE_COLLAPSE.value, Causes.LOSS_SCALE_FALLING.value)
    return "forward" if overflow and at and at.flag("loss_nonfinite") else cause.phase


_Place = tuple[str, str]
"""Rank and layer; empty where nothing more is known than the conditions say."""
_Begin = Callable[[Case, int], int]
_Look = Callable[[Case, int], Iterator[Argument]]


def _as_it_is(_: Case, sequence: int) -> int:
    return sequence


def _nothing_more(_: Case, __: int) -> Iterator[Argument]:
    return iter(())


def _nowhere(_: Case, __: int) -> _Place:
    return "", ""


def _exploded(case: Case, sequence: int) -> list[MergedStep]:
    high = case.limit("grad_norm_high")
    return [
        step
        for step in case.judged
        if step.sequence >= sequence and norm_of(step) > high and case.usual(step).exploded
    ]


def _left(case: Case, sequence: int) -> list[MergedStep]:
    """Return the steps from one on whose loss was unusual, or not finite."""
    after = case.since(sequence)
    return [s for s in after if case.usual(s).loss_above or s.flag("loss_nonfinite")]


def _contained(case: Case, condition: ActiveCondition) -> bool:
    """Return whether nothing of an explosion reached the weights, by all steps of the record.

    The alert had to decide before the loss had shown it, in the first steps without a usual loss.
    """
    since = case.sequence_of(condition.since_step)
    exploded = _exploded(case, since)
    return bool(exploded) and all(s.contained for s in exploded) and not _left(case, since)


def _explosion(case: Case, sequence: int) -> Iterator[Argument]:
    exploded, first = _exploded(case, sequence), case.step_at(sequence)
    if not exploded or first is None:
        return
    usual, largest = case.usual(first).norm, max(map(norm_of, exploded))
    before = f", {largest / usual:.3g} times the usual {usual:.3g}" if usual else ""
    text = f"The norm was far above the usual one on {len(exploded)} step(s), {largest:.3g} at most"
    yield Argument(f"{text}{before}.", MEDIUM)
    if left := _left(case, sequence):
        yield Argument(f"The loss left its usual level from step {left[0].step} on.", MEDIUM)
    table = case.layers_at(sequence)
    if table is not None and (total := float(table.column("sum_squares").sum())) > 0.0:
        share = float(table.column("sum_squares").max()) / total
        layer = _largest_layer(case, sequence)[1]
        yield Argument(f"Layer {layer} holds {share:.0%} of the squared norm there.", WEAK)
    if all(step.contained for step in exploded):
        limit = first.get("clip_max_norm")
        how = f"clipped to {limit:g}" if limit else "clipped, or kept from the weights"
        yield Argument(f"All of these steps were {how}.", -STRONG)
    elif not any(step.contained for step in exploded):
        yield Argument("Nothing clipped these gradients.", WEAK)


def _largest_layer(case: Case, sequence: int) -> _Place:
    table = case.layers_at(sequence)
    if table is None or not table.column("sum_squares").any():
        return "", ""
    return "", table.names[int(table.column("sum_squares").argmax())]


def _rate_jump(case: Case, sequence: int) -> Iterator[Argument]:
    at, highest = case.step_at(sequence), max(_rates_before(case, sequence), default=0.0)
    if at and highest and (rate := at.get("learning_rate")):
        factor = f"{rate / highest:.3g}-fold"
        yield Argument(
            f"The learning rate rose from {highest:.3g} to {rate:.3g}, {factor}.", MEDIUM
        )
    if left := _left(case, sequence):
        yield Argument(f"The loss then left its usual level, on step {left[0].step}.", MEDIUM)


def _rates_before(case: Case, sequence: int) -> list[float]:
    before = (step.get("learning_rate") for step in case.steps if step.sequence < sequence)
    return [rate for rate in before if rate is not None]


def _rate_zero(case: Case, sequence: int) -> Iterator[Argument]:
    if rates := _rates_before(case, sequence):
        text = f"It was {max(rates):.3g} at most before: the schedule ended before the run."
        yield Argument(text, MEDIUM)
    else:
        text = "No earlier step is kept: it may be the beginning of a warm-up."
        yield Argument(text, -MEDIUM)


_GAP_STEPS = 50
"""Steps between two skipped ones of one fall of the loss scale."""


def _fall(case: Case, sequence: int) -> list[MergedStep]:
    """Return the skipped steps between which the scale did not grow, about or before a step."""
    found: list[MergedStep] = []
    for step in case.steps:
        if not step.skipped or step.loss_scale is None:
            continue
        near = found and step.sequence - found[-1].sequence <= _GAP_STEPS
        if found and (not near or step.loss_scale > (found[-1].loss_scale or 0.0)):
            if step.sequence > sequence:
                break
            found = []
        found.append(step)
    return found


def _fall_begin(case: Case, sequence: int) -> int:
    return min([sequence, *(step.sequence for step in _fall(case, sequence)[:1])])


def _falling(case: Case, sequence: int) -> Iterator[Argument]:
    fall, floor = _fall(case, sequence), case.limit("loss_scale_floor")
    scales = [step.loss_scale or 0.0 for step in fall]
    if skips := sum(scale <= floor for scale in scales):
        text = f"{skips} step(s) were skipped at a scale of {floor:g} or below: no lower one helps."
        yield Argument(text, MEDIUM)
    if scales and scales[0] > scales[-1]:
        text = (
            f"The loss scale fell from {scales[0]:g} to {scales[-1]:g} between steps "
            f"{fall[0].step} and {fall[-1].step}, and never grew in between."
        )
        yield Argument(text, MEDIUM)
    if forward := sum(step.flag("loss_nonfinite") for step in fall):
        text = (
            f"On {forward} of the {len(fall)} skipped steps the loss itself was NaN or Inf: the "
            "overflow is in the forward pass, which the loss scale does not reach."
        )
        yield Argument(text, WEAK)


def _overflowing(case: Case, sequence: int) -> _Place:
    """Return the layer nearest to the output whose gradients overflowed, if it was sampled."""
    at = case.step_at(sequence)
    if at is None or at.flag("loss_nonfinite"):
        blamed = at.nonfinite_loss_ranks if at else ()
        everyone = at is None or len(blamed) == len(at.present_ranks)
        return "" if everyone else ",".join(map(str, blamed)), ""
    tables = [table for table in case.history.tables if table.sequence == sequence]
    found = [t.names[i] for t in tables for i, bad in enumerate(t.nonfinite) if bad > 0]
    return "", found[-1] if found else ""


_LOSS_STEPS = 10
_LOSS_FALLS = 0.9


def _low_begin(case: Case, sequence: int) -> int:
    """Return the first of the steps up to this one with a norm as low as it had."""
    until = [step for step in reversed(case.judged) if step.sequence <= sequence]
    limits = sorted(map(case.limit, ("grad_norm_vanished", "grad_norm_very_low", "grad_norm_low")))
    limit = next((each for each in limits if until and norm_of(until[0]) < each), 0.0)
    low = list(takewhile(lambda step: norm_of(step) < limit, until))
    return low[-1].sequence if low else sequence


def _vanishing(case: Case, sequence: int) -> Iterator[Argument]:
    if not case.judged:
        return
    at, last = case.step_at(sequence), case.judged[-1]
    usual = case.usual(at).norm if at else None
    if usual and norm_of(last) < case.limit("grad_norm_fall") * usual:
        yield Argument(f"It fell from the usual {usual:.3g} to {norm_of(last):.3g}.", MEDIUM)
    losses = case.losses(case.since(sequence))
    begin, end = losses[:_LOSS_STEPS], losses[-_LOSS_STEPS:]
    if len(losses) >= 2 * _LOSS_STEPS and median(end) < _LOSS_FALLS * median(begin):
        # The mildest level of the alert waits instead, which a record is too short for.
        text = f"The loss still fell, from {median(begin):.3g} to {median(end):.3g}."
        yield Argument(text, -STRONG)


def _smallest_layer(case: Case, sequence: int) -> _Place:
    """Return the layer with the smallest norm above 0, if layers were sampled."""
    table = case.layers_at(sequence)
    squares = [] if table is None else table.column("sum_squares").tolist()
    alive = [(square, index) for index, square in enumerate(squares) if square > 0]
    return "", table.names[min(alive)[1]] if table is not None and alive else ""


def _emptied(case: Case) -> list[LayerSample]:
    """Return the last samples, if too many layers have far more zeros in them than in the first.

    A record holds few samples, and the account takes five to know what is usual of a layer.
    """
    found: list[LayerSample] = []
    for table in _finite(case):
        too_many = case.limit("underflow_layers") * len(table.names)
        found = [*found, table] if len(_lost(case, table)) > too_many else []
    return found


def _finite(case: Case) -> list[LayerSample]:
    return [table for table in case.history.tables if not table.nonfinite.any()]


def _lost(case: Case, table: LayerSample) -> list[str]:
    """Return the layers of a sample with far more zeros than in the first one."""
    first = _finite(case)[0]
    if table.names != first.names:
        return []
    risen = table.zero_shares - first.zero_shares > case.limit("layer_zero_rise")
    return [name for name, is_risen in zip(table.names, risen, strict=True) if is_risen]


def _emptied_begin(case: Case, sequence: int) -> int:
    return min((table.sequence for table in _emptied(case)), default=sequence)


def _underflow(case: Case, sequence: int) -> Iterator[Argument]:
    if emptied := _emptied(case):
        lost, layers = _lost(case, emptied[-1]), len(emptied[-1].names)
        text = f"{len(lost)} of {layers} layers have far more zeros than in the first sample"
        yield Argument(f"{text}; {lost[-1]} is nearest to the output.", STRONG)
    if not case.in_fp16:
        text = "The gradients are not in FP16, the format with the smallest range."
        yield Argument(text, -MEDIUM)
    elif case.has_scaler:
        yield Argument("FP16 rounds gradients below 6e-8 to zero, after scaling.", MEDIUM)


def _emptied_layer(case: Case, sequence: int) -> _Place:
    emptied = _emptied(case)
    return "", _lost(case, emptied[-1])[-1] if emptied else ""


def _zero_gradients(case: Case, sequence: int) -> Iterator[Argument]:
    losses = case.losses(case.since(sequence))
    if losses and max(losses) == 0.0:
        yield Argument("The loss was exactly 0 as well: labels may be masked.", MEDIUM)
    elif losses and min(losses) < max(losses):
        text = "The loss was not 0 and still varied: something between it and the parameters "
        text += "multiplies by 0, such as a mask, units that are all off, or adapters of zeros."
        yield Argument(text, WEAK)


def _without_gradients(case: Case, _: int) -> Iterator[Argument]:
    if names := case.evidence.facts.get(UNHELD):
        yield Argument(f"No optimizer holds parameters that have gradients: {names}.", STRONG)


def _constant_loss(case: Case, sequence: int) -> Iterator[Argument]:
    norms = {norm_of(step) for step in case.judged if step.sequence >= sequence}
    if len(norms) == 1:
        yield Argument(f"The gradient norm was {norms.pop():.4g} on every step.", MEDIUM)


def _differing(case: Case, sequence: int) -> _Place:
    at = case.step_at(sequence)
    ranks = (own.minority_ranks for own in at.replicas.values() if not own.agree) if at else ()
    return ",".join(map(str, next(iter(ranks), ()))), ""


_RISEN_MIN = 5


def _risen(case: Case) -> list[MergedStep]:
    """Return the last steps, if their losses stayed above the bound that the first one exceeded.

    The alert waits for many more of them; a run that was stopped at once has no more.
    """
    risen: list[MergedStep] = []
    for step in case.steps:
        if (loss := step.get("loss")) is None or step.skipped:
            continue
        bound = case.usual(risen[0] if risen else step).loss_bound
        risen = [*risen, step] if bound is not None and loss > bound else []
    return risen if len(risen) >= _RISEN_MIN else []


def _risen_begin(case: Case, sequence: int) -> int:
    return min((step.sequence for step in _risen(case)), default=sequence)


def _rising(case: Case, _: int) -> Iterator[Argument]:
    if risen := _risen(case):
        bound, last = case.usual(risen[0]).loss_bound or 0.0, risen[-1].get("loss") or 0.0
        yield Argument(
            f"The loss was {last:.3g} at the end, and above its bound of {bound:.3g} on the last "
            f"{len(risen)} steps.",
            MEDIUM,
        )


_LOOKS: Mapping[Cause, tuple[_Begin, _Look, Callable[[Case, int], _Place]]] = {
    cause.value: looks
    for cause, looks in {
        Causes.GRADIENT_EXPLOSION: (_as_it_is, _explosion, _largest_layer),
        Causes.LEARNING_RATE_JUMP: (_as_it_is, _rate_jump, _nowhere),
        Causes.LEARNING_RATE_ZERO: (_as_it_is, _rate_zero, _nowhere),
        Causes.LOSS_SCALE_COLLAPSE: (_fall_begin, _falling, _overflowing),
        Causes.LOSS_SCALE_FALLING: (_fall_begin, _falling, _overflowing),
        Causes.GRADIENT_VANISHING: (_low_begin, _vanishing, _smallest_layer),
        Causes.GRADIENT_UNDERFLOW: (_emptied_begin, _underflow, _emptied_layer),
        Causes.NEVER_REDUCED: (apart_begin, not_reduced, _nowhere),
        Causes.WITHOUT_GRADIENTS: (_as_it_is, _without_gradients, _nowhere),
        Causes.ZERO_GRADIENTS: (_as_it_is, _zero_gradients, _nowhere),
        Causes.CONSTANT_LOSS: (_as_it_is, _constant_loss, _nowhere),
        Causes.REPLICA_DIVERGENCE: (_as_it_is, _nothing_more, _differing),
        Causes.LOSS_DIVERGING: (_risen_begin, _rising, _nowhere),
    }.items()
}
"""Where a cause began before its condition held, what else speaks for it, and where it is."""
