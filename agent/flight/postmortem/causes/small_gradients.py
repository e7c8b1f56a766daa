"""Gradients that become too small, and loss scales that collapse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.diagnosis import (
    MEDIUM,
    STRONG,
    WEAK,
    Argument,
    Causes,
    Diagnosis,
    LayerSample,
)
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import FloatArray

_LOSS_STEPS = 10
_LOSS_FALLS = 0.9

Layers = npt.NDArray[np.bool_]
"""Which layers [L] something is true of."""

_LEVELS = (
    ("grad_norm_vanished", 5, STRONG + MEDIUM),
    ("grad_norm_very_low", 20, STRONG),
    ("grad_norm_low", 100, MEDIUM),
)
"""Threshold, consecutive steps below it up to the end, weight."""


def vanishing(case: Case) -> Iterator[Diagnosis]:
    """Yield that the norm ended below one of its lower limits, and stayed there."""
    for threshold, steps_min, weight in _LEVELS:
        limit = case.limit(threshold)
        low = _low_at_the_end(case.judged, limit)
        if len(low) < steps_min:
            continue
        text = f"The gradient norm stayed below {limit:g} on the last {len(low)} steps that count."
        arguments_for = [Argument(text, weight), *_fell(case, low[0])]
        falls = _loss_falls(case, low)
        if falls is None:
            arguments_for.append(Argument("The loss no longer changed.", WEAK))
        yield Diagnosis(
            cause=Causes.GRADIENT_VANISHING.value,
            sequence=low[0].sequence,
            step=low[0].step,
            layer=_smallest_layer(case, low[0].sequence),
            phase="backward",
            arguments_for=tuple(arguments_for),
            arguments_against=() if falls is None else (falls,),
        )
        return


def underflow(case: Case) -> Iterator[Diagnosis]:
    """Yield that gradients of layers underflowed to zero, or that layers stopped learning."""
    tables = [table for table in case.history.tables if not table.nonfinite.any()]
    if len(tables) < 2 or tables[0].names != tables[-1].names or not tables[0].names:
        return
    lost = _underflowing(case, tables[-1], tables[0]) | _dead(case, tables)
    if lost.sum() <= case.limit("underflow_layers") * len(lost):
        return
    names = [tables[0].names[index] for index in np.flatnonzero(lost)]
    first = next(table for table in tables[1:] if _affected(case, table, tables[0]))
    fp16 = "fp16" in case.evidence.facts.get("precision", "")
    yield Diagnosis(
        cause=Causes.GRADIENT_UNDERFLOW.value,
        sequence=first.sequence,
        step=case.number_of(first.sequence),
        layer=names[-1],
        phase="backward",
        arguments_for=tuple(_lost(names, len(lost), tables, case, fp16=fp16)),
        arguments_against=()
        if fp16
        else (
            Argument("The gradients are not in FP16, the format with the smallest range.", MEDIUM),
        ),
    )


def _low_at_the_end(judged: Sequence[MergedStep], limit: float) -> list[MergedStep]:
    low: list[MergedStep] = []
    for step in reversed(judged):
        if norm_of(step) >= limit:
            break
        low.append(step)
    return low[::-1]


def _fell(case: Case, first: MergedStep) -> Iterator[Argument]:
    earlier = case.judged_before(first.sequence, 50)
    usual = median(map(norm_of, earlier)) if earlier else 0.0
    last = norm_of(case.judged[-1])
    if last < case.limit("grad_norm_fall") * usual:
        yield Argument(f"It fell from {usual:.3g}, the median before, to {last:.3g}.", MEDIUM)


def _loss_falls(case: Case, low: Sequence[MergedStep]) -> Argument | None:
    losses = case.losses(low)
    if len(losses) < 2 * _LOSS_STEPS:
        return None
    begin, end = median(losses[:_LOSS_STEPS]), median(losses[-_LOSS_STEPS:])
    if end >= _LOSS_FALLS * begin:
        return None
    return Argument(f"The loss still fell in the meantime, from {begin:.3g} to {end:.3g}.", STRONG)


def _smallest_layer(case: Case, sequence: int) -> str:
    """Return the layer with the smallest norm above 0, if layers were sampled."""
    table = case.layers_at(sequence)
    if table is None:
        return ""
    squares = table.column("sum_squares")
    alive = [index for index, square in enumerate(squares.tolist()) if square > 0]
    return table.names[min(alive, key=lambda index: float(squares[index]))] if alive else ""


def _zero_share(table: LayerSample) -> FloatArray:
    share: FloatArray = table.column("zero_elements") / np.maximum(table.column("elements"), 1.0)
    return share


def _underflowing(case: Case, table: LayerSample, baseline: LayerSample) -> Layers:
    """Return the layers with far more zeros than in the baseline."""
    risen: Layers = _zero_share(table) - _zero_share(baseline) > case.limit("layer_zero_rise")
    return risen


def _tiny(case: Case, table: LayerSample, baseline: LayerSample) -> Layers:
    """Return the layers whose gradient fell to almost nothing since the baseline."""
    largest, before = table.column("abs_max"), baseline.column("abs_max")
    fallen = largest <= case.limit("layer_fall") * before
    tiny: Layers = fallen & (largest < case.limit("layer_dead_abs_max")) & (before > 0)
    return tiny


def _dead(case: Case, tables: Sequence[LayerSample]) -> Layers:
    """Return the layers that had a gradient at first and none in the last samples."""
    samples = int(case.limit("layer_dead_samples"))
    dead: Layers = tables[0].column("abs_max") >= case.limit("layer_dead_abs_max")
    if len(tables) <= samples:
        return np.zeros_like(dead)
    for table in tables[-samples:]:
        dead = dead & _tiny(case, table, tables[0])
    return dead


def _affected(case: Case, table: LayerSample, baseline: LayerSample) -> bool:
    return bool((_underflowing(case, table, baseline) | _tiny(case, table, baseline)).any())


def _lost(
    names: Sequence[str],
    layers: int,
    tables: Sequence[LayerSample],
    case: Case,
    *,
    fp16: bool,
) -> Iterator[Argument]:
    begin, end = case.number_of(tables[0].sequence), case.number_of(tables[-1].sequence)
    yield Argument(
        f"Between steps {begin} and {end}, {len(names)} of {layers} layers lost all of their "
        f"gradient, or more than {case.limit('layer_zero_rise'):.0%} of its elements, to zero; "
        f"{names[-1]} is nearest to the output.",
        STRONG,
    )
    if fp16 and case.has_scaler:
        yield Argument("FP16 rounds gradients below 6e-8 to zero, after scaling.", MEDIUM)


_GAP_STEPS = 50


@dataclass(frozen=True, slots=True)
class _Storm:
    """Skipped steps between which the scale did not grow."""

    skipped: tuple[MergedStep, ...]

    @property
    def first(self) -> MergedStep:
        return self.skipped[0]

    @property
    def last(self) -> MergedStep:
        return self.skipped[-1]

    @property
    def scales(self) -> list[float]:
        return [_scale(step) for step in self.skipped]


def loss_scale(case: Case) -> Iterator[Diagnosis]:
    """Yield the collapse of the loss scale, or that it keeps falling."""
    storms = [storm for storm in _storms(case) if not _calibrating(case, storm)]
    if not storms:
        return
    worst = min(storms, key=lambda storm: (min(storm.scales), storm.first.sequence))
    floor_skips = _at_floor(case, worst)
    fallen = case.limit("loss_scale_share_of_initial") * worst.scales[0]
    collapsed = floor_skips > 0 or worst.scales[-1] <= fallen
    arguments_for = [*_fall(case, worst, floor_skips), *_forward(worst), *_share(case)]
    if (
        not collapsed
        and len(worst.skipped) < case.limit("loss_scale_decreases_in_row")
        and not _share(case)
    ):
        return
    cause = Causes.LOSS_SCALE_COLLAPSE if collapsed else Causes.LOSS_SCALE_FALLING
    forward = worst.first.flag("loss_nonfinite")
    yield Diagnosis(
        cause=cause.value,
        sequence=worst.first.sequence,
        step=worst.first.step,
        rank=_blamed(worst.first),
        layer="" if forward else _overflowing_layer(case, worst.first.sequence),
        phase="forward" if forward else "backward",
        arguments_for=tuple(arguments_for),
    )


def _storms(case: Case) -> Iterator[_Storm]:
    current: list[MergedStep] = []
    for step in case.steps:
        if not step.skipped or step.loss_scale is None:
            continue
        near = current and step.sequence - current[-1].sequence <= _GAP_STEPS
        if current and (not near or _scale(step) > _scale(current[-1])):
            yield _Storm(tuple(current))
            current = []
        current.append(step)
    if current:
        yield _Storm(tuple(current))


def _calibrating(case: Case, storm: _Storm) -> bool:
    """Return whether GradScaler was only calibrating, or skipped a step occasionally.

    Calibration never ends at the floor.
    """
    if _at_floor(case, storm):
        return False
    early = storm.last.sequence <= case.limit("calibration_steps")
    return early or len(storm.skipped) < case.limit("loss_scale_net_decreases")


def _at_floor(case: Case, storm: _Storm) -> int:
    """Return the steps skipped at the floor; 0 unless there are enough, or the scale went below."""
    floor = case.limit("loss_scale_floor")
    skips = sum(scale <= floor for scale in storm.scales)
    below = min(storm.scales) < floor
    return skips if below or skips >= case.limit("floor_skips") else 0


def _fall(case: Case, storm: _Storm, floor_skips: int) -> Iterator[Argument]:
    if floor_skips:
        text = (
            f"{floor_skips} step(s) were skipped at a scale of "
            f"{case.limit('loss_scale_floor'):g} or below: no lower one helps."
        )
        yield Argument(text, STRONG)
    halvings = len(set(storm.scales))
    if halvings > 1:
        scales = storm.scales
        yield Argument(
            f"The loss scale fell from {scales[0]:g} to {scales[-1]:g} between steps "
            f"{storm.first.step} and {storm.last.step}, and never grew in between.",
            STRONG if halvings >= case.limit("loss_scale_decreases_in_row") else MEDIUM,
        )


def _forward(storm: _Storm) -> Iterator[Argument]:
    in_forward = sum(step.flag("loss_nonfinite") for step in storm.skipped)
    if in_forward:
        yield Argument(
            f"On {in_forward} of the {len(storm.skipped)} skipped steps the loss itself was NaN "
            "or Inf: the overflow is in the forward pass, which the loss scale does not reach.",
            WEAK,
        )
    elif len(storm.skipped) > 1:
        text = "The loss stayed finite: it is the scaled gradients that overflow."
        yield Argument(text, WEAK)


def _share(case: Case) -> list[Argument]:
    """Return the share of skipped steps after calibration, if it is above the limit."""
    settled = [s for s in case.steps if s.sequence > case.limit("calibration_steps")]
    skipped = sum(step.skipped for step in settled)
    if len(settled) < case.limit("overflow_steps") or skipped < case.limit("overflow_skips"):
        return []
    share = skipped / len(settled)
    if share <= case.limit("overflow_warning"):
        return []
    text = f"{skipped} of the last {len(settled)} steps were skipped ({share:.1%})."
    return [Argument(text, MEDIUM if share > case.limit("overflow_critical") else WEAK)]


def _overflowing_layer(case: Case, sequence: int) -> str:
    """Return the layer nearest to the output whose gradients overflowed, if it was sampled."""
    tables = (table for table in case.history.tables if table.sequence == sequence)
    table = next(tables, None)
    if table is None:
        return ""
    return _last_named(table.names, table.nonfinite.tolist())


def _last_named(names: Sequence[str], counts: Sequence[float]) -> str:
    found = [name for name, count in zip(names, counts, strict=True) if count > 0]
    return found[-1] if found else ""


def _blamed(step: MergedStep) -> str:
    blamed = step.nonfinite_loss_ranks
    everyone = len(blamed) == len(step.present_ranks)
    return "" if everyone else ",".join(map(str, blamed))


def _scale(step: MergedStep) -> float:
    return step.loss_scale or 0.0
