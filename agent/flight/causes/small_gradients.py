"""Gradients that become too small: they vanish, or FP16 cannot hold them."""

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from mp_agent.flight.case import Case, norm_of
from mp_agent.flight.findings import MEDIUM, STRONG, WEAK, Argument, Causes, Diagnosis
from mp_agent.flight.history import LayerHistory
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import FloatArray

_GROWTH = 10.0
_LOSS_STEPS = 10
_LOSS_FALLS = 0.9

_LEVELS = (
    ("grad_norm_vanished", 5, STRONG + MEDIUM),
    ("grad_norm_very_low", 20, STRONG),
    ("grad_norm_low", 100, MEDIUM),
)
"""Threshold, steps in a row below it up to the end, weight."""

_ZERO_SHARE_RISE = 0.2
_LAYERS_SHARE = 0.05
_DEAD_ABS_MAX = 1e-10
_DEAD_TABLES = 3


def vanishing(case: Case) -> Iterator[Diagnosis]:
    """Yield that the norm ended below one of its lower limits, and stayed there."""
    for threshold, steps_min, weight in _LEVELS:
        limit = case.limit(threshold)
        low = _low_at_the_end(case.judged, limit)
        if len(low) < steps_min:
            continue
        text = f"The gradient norm stayed below {limit:g} on the last {len(low)} steps that count."
        speaks_for = [Argument(text, weight), *_fell(case, low[0])]
        falls = _loss_falls(case, low)
        if falls is None:
            speaks_for.append(Argument("The loss no longer moved.", WEAK))
        yield Diagnosis(
            cause=Causes.GRADIENT_VANISHING.value,
            sequence=low[0].sequence,
            step=low[0].step,
            layer=_smallest_layer(case, low[0].sequence),
            phase="backward",
            speaks_for=tuple(speaks_for),
            speaks_against=() if falls is None else (falls,),
        )
        return


def underflow(case: Case) -> Iterator[Diagnosis]:
    """Yield that layers lost gradient elements to zero, or stopped learning altogether."""
    tables = [table for table in case.history.tables if not table.nonfinite.any()]
    if len(tables) < 2 or tables[0].names != tables[-1].names or not tables[0].names:
        return
    risen = _zero_share(tables[-1]) - _zero_share(tables[0]) > _ZERO_SHARE_RISE
    dead = _dead(tables)
    lost = risen | dead
    if lost.sum() <= _LAYERS_SHARE * len(lost):
        return
    names = [tables[0].names[index] for index in np.flatnonzero(lost)]
    first = next(t for t in tables[1:] if _affected(t, tables[0]) & lost.any())
    fp16 = "fp16" in case.evidence.facts.get("precision", "")
    yield Diagnosis(
        cause=Causes.GRADIENT_UNDERFLOW.value,
        sequence=first.sequence,
        step=case.number_of(first.sequence),
        layer=names[-1],
        phase="backward",
        speaks_for=tuple(_lost(names, len(lost), tables, case, fp16=fp16)),
        speaks_against=()
        if fp16
        else (Argument("The gradients are not in FP16, whose range ends early.", MEDIUM),),
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
    if usual > _GROWTH * last:
        yield Argument(f"It fell from {usual:.3g}, the median before, to {last:.3g}.", MEDIUM)


def _loss_falls(case: Case, low: Sequence[MergedStep]) -> Argument | None:
    losses = case.losses(low)
    if len(losses) < 2 * _LOSS_STEPS:
        return None
    begin, end = median(losses[:_LOSS_STEPS]), median(losses[-_LOSS_STEPS:])
    if end >= _LOSS_FALLS * begin:
        return None
    return Argument(f"The loss still fell meanwhile, from {begin:.3g} to {end:.3g}.", STRONG)


def _smallest_layer(case: Case, sequence: int) -> str:
    """Return the layer with the smallest norm that has a gradient at all, if it was looked at."""
    table = case.layers_at(sequence)
    if table is None:
        return ""
    squares = table.column("sum_squares")
    alive = [index for index, square in enumerate(squares.tolist()) if square > 0]
    return table.names[min(alive, key=lambda index: float(squares[index]))] if alive else ""


def _zero_share(table: LayerHistory) -> FloatArray:
    share: FloatArray = table.column("zero_elements") / np.maximum(table.column("elements"), 1.0)
    return share


def _dead(tables: Sequence[LayerHistory]) -> npt.NDArray[np.bool_]:
    """Return the layers that had a gradient once and have had none in the last samples."""
    had = tables[0].column("abs_max") >= _DEAD_ABS_MAX
    if len(tables) <= _DEAD_TABLES:
        return np.zeros_like(had)
    for table in tables[-_DEAD_TABLES:]:
        had = had & (table.column("abs_max") < _DEAD_ABS_MAX)
    return had


def _affected(table: LayerHistory, baseline: LayerHistory) -> bool:
    risen = _zero_share(table) - _zero_share(baseline) > _ZERO_SHARE_RISE
    return bool((risen | (table.column("abs_max") < _DEAD_ABS_MAX)).any())


def _lost(
    names: Sequence[str],
    layers: int,
    tables: Sequence[LayerHistory],
    case: Case,
    *,
    fp16: bool,
) -> Iterator[Argument]:
    begin, end = case.number_of(tables[0].sequence), case.number_of(tables[-1].sequence)
    yield Argument(
        f"Between steps {begin} and {end}, {len(names)} of {layers} layers lost more than a fifth "
        f"of their gradient elements to zero; {names[-1]} is nearest to the output.",
        STRONG,
    )
    if fp16 and case.has_scaler:
        yield Argument("FP16 rounds gradients below 6e-8 to zero, after scaling.", MEDIUM)
