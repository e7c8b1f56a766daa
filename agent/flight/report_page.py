"""An analysis as a page, with plots of the last steps and the worst layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import isfinite, log, log10

from mp_agent.flight.postmortem.analysis import Analysis, LayerSummary
from mp_agent.flight.postmortem.case import headroom_bits
from mp_agent.flight.report import (
    condition_text,
    facts,
    moves_table,
    ranks_table,
    steps_table,
    verdict,
)
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep
from mp_agent.report.content import Curve, Lane, Plot, Plots, Values
from mp_agent.report.numbers import number
from mp_agent.report.page import render

LANES_MAX = 32
"""Ranks that are shown at most."""
LANE_KINDS = {
    "fine": "delivered",
    "skipped": "skipped by GradScaler",
    "lost": "its own loss or gradients NaN or Inf",
    "absent": "not delivered",
}
"""What a rank did at a step, and its text."""
_TONES = {"likely": "bad", "possible": "warn", "consequence": "info", "unlikely": ""}

_WIDE_LOSS = 1000.0
_WIDE_RATE = 10.0
"""Largest over smallest value from which on the axis is logarithmic."""
_LIMIT_NAMES = {"grad_norm_extreme": "extreme", "grad_norm_high": "high", "grad_norm_low": "low"}
_SHORTEST_PERCENT = 15.0
"""Height of the smallest norm: a logarithm has no zero to start from."""


def as_html(analysis: Analysis) -> str:
    """Return the analysis as one page that loads nothing."""
    plots, ranks = plots_of(analysis), analysis.evidence.ranks
    return render(
        "postmortem",
        tool="post-mortem",
        title=analysis.evidence.identity.run,
        verdict=verdict(analysis),
        good=analysis.first_bad is None,
        facts=facts(analysis),
        plots=[plots] if plots else (),
        analysis=analysis,
        likelihoods=_TONES,
        lane_kinds=LANE_KINDS,
        lanes_omitted=len(ranks) - len(plots.lanes) if plots else 0,
        layers=layer_bars(analysis.layers),
        changes=moves_table(analysis),
        steps=steps_table(analysis),
        ranks=ranks_table(analysis, LANES_MAX),
        conditions=[condition_text(one) for one in analysis.evidence.conditions],
        not_measured=", ".join(text for _, text in analysis.not_measured),
    )


def plots_of(analysis: Analysis) -> Plots | None:
    """Return the plots; None for a run without a step."""
    if not analysis.history.steps:
        return None
    bad = analysis.first_bad.sequence if analysis.first_bad else None
    axis = _Axis(analysis.history.steps, bad)
    lanes = [(log, _runs(log, axis.steps)) for log in analysis.evidence.ranks]
    remarkable = [item for item in lanes if any(kind != "fine" for _, _, kind in item[1])]
    shown = lanes if len(lanes) <= LANES_MAX else (remarkable or lanes)[:LANES_MAX]
    return Plots(
        places=axis.sequence,
        steps=axis.numbers,
        marked=bad,
        plots=_plots(axis, analysis),
        lanes=[Lane(f"rank {log.identity.rank}", runs) for log, runs in shown],
    )


class _Axis:
    """The steps as a common axis, with an empty place wherever some are missing."""

    def __init__(self, steps: Sequence[MergedStep], bad: int | None) -> None:
        self.steps = steps
        known = {step.sequence: step.step for step in steps}
        missing = {a + 1 for a, b in pairwise(sorted(known)) if b != a + 1}
        places = {*known, *missing, *(() if bad is None else (bad,))}
        self.sequence = sorted(places)
        self.numbers = [known.get(sequence, sequence) for sequence in self.sequence]
        self._index = {sequence: index for index, sequence in enumerate(self.sequence)}

    def values(self, values: Values, *, positive: bool = False) -> list[float | None]:
        """Return values of the steps on the axis; positive: only those that are."""
        placed: list[float | None] = [None] * len(self.sequence)
        for step, value in zip(self.steps, values, strict=True):
            drawable = value is not None and isfinite(value) and (value > 0 or not positive)
            placed[self._index[step.sequence]] = value if drawable else None
        return placed

    def marks(self, notes: Mapping[int, str]) -> dict[int, str]:
        """Return notes on steps, given by sequence number, by their index."""
        return {self._index[sequence]: note for sequence, note in notes.items()}


def _plots(axis: _Axis, analysis: Analysis) -> list[Plot]:
    """Return loss, gradient norm and, where there are any, learning rate and loss scale."""
    steps = axis.steps
    plots = [_loss(axis), _norm(axis, analysis)]
    rates = [step.get("learning_rate") for step in steps]
    if len({rate for rate in rates if rate is not None}) > 1:
        plots.append(
            Plot(
                id="learning-rate",
                title="Learning rate",
                caption="of the optimizer's first parameter group",
                curves=[Curve("learning rate", axis.values(rates))],
                log=10 if _is_wide(rates, _WIDE_RATE) else None,
            )
        )
    if any(step.loss_scale is not None for step in steps):
        plots += _scale_plots(axis)
    return plots


def _loss(axis: _Axis) -> Plot:
    losses = [step.get("loss") for step in axis.steps]
    lost = {s.sequence: "NaN or Inf" for s in axis.steps if s.flag("loss_nonfinite")}
    return Plot(
        id="loss",
        title="Loss",
        caption="sum over the backward passes of a step, mean over ranks; × marks NaN or Inf",
        curves=[Curve("loss", axis.values(losses))],
        log=10 if _is_wide(losses, _WIDE_LOSS) else None,
        marks=axis.marks(lost),
    )


def _norm(axis: _Axis, analysis: Analysis) -> Plot:
    norms = [step.grad_norm if step.gradients_judged else None for step in axis.steps]
    values = axis.values(norms, positive=True)
    limits = [(value, f"{_LIMIT_NAMES[name]}: {value:g}") for name, value in analysis.limits]
    clips = (step.get("clip_max_norm") for step in axis.steps)
    clip = next((value for value in clips if value is not None), None)
    if clip is not None:
        limits.append((clip, f"clipped at {clip:g}"))
    return Plot(
        id="grad-norm",
        title="Gradient norm",
        caption="unscaled, before clipping; × marks steps with NaN or Inf gradients",
        curves=[Curve("norm", values)],
        log=10,
        limits=[limit for limit in limits if _is_near(limit[0], values)],
        marks=axis.marks(
            {
                s.sequence: f"{s.gradient_nonfinite_elements:.0f} NaN/Inf"
                for s in axis.steps
                if s.gradient_nonfinite_elements > 0
            }
        ),
    )


def _scale_plots(axis: _Axis) -> list[Plot]:
    steps = axis.steps
    plots = [
        Plot(
            id="loss-scale",
            title="Loss scale",
            caption="logarithmic; × marks skipped steps",
            curves=[
                Curve("scale", axis.values([step.loss_scale for step in steps], positive=True))
            ],
            log=2,
            marks=axis.marks({s.sequence: "skipped" for s in steps if s.skipped}),
        )
    ]
    headroom = [headroom_bits(step) if not step.skipped else None for step in steps]
    if any(value is not None for value in headroom):
        plots.append(
            Plot(
                id="headroom",
                title="FP16 headroom",
                caption="how often the scaled gradients could double before they overflow",
                curves=[Curve("bits", axis.values(headroom))],
            )
        )
    return plots


def _is_wide(values: Values, factor: float) -> bool:
    """Return whether values are all positive and span more than a factor."""
    known = [value for value in values if value is not None]
    return bool(known) and min(known) > 0 and max(known) >= factor * min(known)


def _is_near(limit: float, values: Values) -> bool:
    """Return whether a limit is so near to the values that showing it does not flatten them."""
    known = [log(value) for value in values if value is not None]
    if not known or limit <= 0:
        return False
    room = max(max(known) - min(known), log(10.0)) * 1.2
    return min(known) - room <= log(limit) <= max(known) + room


def _runs(log: RankLog, steps: Sequence[MergedStep]) -> list[tuple[int, int, str]]:
    """Return what a rank did, as runs of consecutive steps of one kind."""
    kinds = [(step.sequence, _kind(log.identity.rank, step)) for step in steps]
    # Within a run, sequence numbers rise as the index does.
    grouped = groupby(enumerate(kinds), key=lambda item: (item[1][0] - item[0], item[1][1]))
    runs = []
    for (_, kind), items in grouped:
        sequences = [sequence for _, (sequence, _) in items]
        runs.append((sequences[0], sequences[-1], kind))
    return runs


def _kind(rank: int, step: MergedStep) -> str:
    if rank not in step.present_ranks:
        return "absent"
    if rank in step.nonfinite_loss_ranks or rank in step.nonfinite_gradient_ranks:
        return "lost"
    return "skipped" if step.skipped else "fine"


@dataclass(frozen=True, slots=True)
class LayerBar:
    """A layer's name, the length of its bar in percent, its class, and the text next to it."""

    name: str
    percent: float
    kind: str
    text: str


def layer_bars(layers: Sequence[LayerSummary]) -> list[LayerBar]:
    """Return a bar per layer: the share of NaN and Inf, or the norm on a logarithmic scale."""
    norms = [layer.norm for layer in layers if layer.norm > 0]
    low, high = (log10(min(norms)), log10(max(norms))) if norms else (0.0, 0.0)
    return [_bar(layer, low, high) for layer in layers]


def _bar(layer: LayerSummary, low: float, high: float) -> LayerBar:
    """Return the bar of a layer, given the logarithms of the smallest and largest norm."""
    if layer.nonfinite_elements > 0:
        share = layer.nonfinite_elements / max(layer.elements, 1.0)
        text = f"{layer.nonfinite_elements:.0f} of {layer.elements:.0f} NaN/Inf"
        return LayerBar(layer.name, round(100.0 * share, 1), "bad", text)
    if layer.norm <= 0:
        return LayerBar(layer.name, 0.0, "fine", "0")
    place = (log10(layer.norm) - low) / (high - low) if high > low else 1.0
    percent = _SHORTEST_PERCENT + (100.0 - _SHORTEST_PERCENT) * place
    return LayerBar(layer.name, round(percent, 1), "fine", number(layer.norm))
