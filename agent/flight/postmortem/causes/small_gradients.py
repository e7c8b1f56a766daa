"""Gradients that become too small: they vanish, or underflow in FP16."""

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from mp_agent.flight.postmortem.case import Case, norm_of
from mp_agent.flight.postmortem.diagnosis import MEDIUM, STRONG, WEAK, Argument, Causes, Diagnosis
from mp_agent.flight.postmortem.history import LayerSample
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
