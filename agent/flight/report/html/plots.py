"""What the page plots, as data: curves over the steps, and a lane per rank."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from math import isfinite, log
from typing import Any

from mp_agent.flight.postmortem.analysis import Analysis
from mp_agent.flight.postmortem.case import headroom_bits
from mp_agent.flight.report.text import number
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep

LANES_MAX = 32
"""Ranks that are shown at most."""
LANE_KINDS = {
    "fine": "delivered",
    "skipped": "skipped by GradScaler",
    "lost": "its own loss or gradients NaN or Inf",
    "absent": "not delivered",
}
"""What a rank did at a step, and its text."""

_WIDE_LOSS = 1000.0
_WIDE_RATE = 10.0
"""Largest over smallest value from which on the axis is logarithmic."""
_LIMIT_NAMES = {"grad_norm_extreme": "extreme", "grad_norm_high": "high", "grad_norm_low": "low"}

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One plot over the steps."""

    id: str
    title: str
    caption: str
    label: str
    values: Values
    """One for each of `Plots.sequence`; None for what was not observed or cannot be drawn."""
    log: int | None = None
    """Base of a logarithmic axis; None for a linear one."""
    limits: Sequence[tuple[float, str]] = ()
    """Horizontal lines: value and label."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """By index of a step that is marked, why."""

    @property
    def description(self) -> str:
        """The plot as text, for readers who do not see it."""
        known = [value for value in self.values if value is not None]
        marks = f"; {len(self.marks)} step(s) marked" if self.marks else ""
        if not known:
            return f"{self.title} per step: no value{marks}"
        ends = f"smallest {number(min(known))}, largest {number(max(known))}"
        return f"{self.title} per step: {ends}, last {number(known[-1])}{marks}"


@dataclass(frozen=True, slots=True)
class Lane:
    """What one rank delivered: runs of steps (first, last, kind)."""

    name: str
    runs: Sequence[tuple[int, int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plots:
    """All plots of a page; `sequence` is their common axis, ascending."""

    sequence: Sequence[int]
    step: Sequence[int]
    """The trainer's number of each."""
    bad: int | None
    """Sequence number of the first bad step."""
    curves: Sequence[Curve]
    lanes: Sequence[Lane]
    lanes_omitted: int

    def as_json(self) -> dict[str, Any]:
        """Return what the script of the page reads; every number is finite."""
        return asdict(self)


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
        sequence=axis.sequence,
        step=axis.numbers,
        bad=bad,
        curves=_curves(axis, analysis),
        lanes=[Lane(f"rank {log.identity.rank}", runs) for log, runs in shown],
        lanes_omitted=len(lanes) - len(shown),
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


def _curves(axis: _Axis, analysis: Analysis) -> list[Curve]:
    """Return loss, gradient norm and, where there are any, learning rate and loss scale."""
    steps = axis.steps
    curves = [_loss(axis), _norm(axis, analysis)]
    rates = [step.get("learning_rate") for step in steps]
    if len({rate for rate in rates if rate is not None}) > 1:
        curves.append(
            Curve(
                id="learning-rate",
                title="Learning rate",
                caption="of the optimizer's first parameter group",
                label="learning rate",
                values=axis.values(rates),
                log=10 if _is_wide(rates, _WIDE_RATE) else None,
            )
        )
    if any(step.loss_scale is not None for step in steps):
        curves += _scale_curves(axis)
    return curves


def _loss(axis: _Axis) -> Curve:
    losses = [step.get("loss") for step in axis.steps]
    lost = {s.sequence: "NaN or Inf" for s in axis.steps if s.flag("loss_nonfinite")}
    return Curve(
        id="loss",
        title="Loss",
        caption="sum over the backward passes of a step, mean over ranks; × marks NaN or Inf",
        label="loss",
        values=axis.values(losses),
        log=10 if _is_wide(losses, _WIDE_LOSS) else None,
        marks=axis.marks(lost),
    )


def _norm(axis: _Axis, analysis: Analysis) -> Curve:
    norms = [step.grad_norm if step.gradients_judged else None for step in axis.steps]
    values = axis.values(norms, positive=True)
    limits = [(value, f"{_LIMIT_NAMES[name]}: {value:g}") for name, value in analysis.limits]
    clips = (step.get("clip_max_norm") for step in axis.steps)
    clip = next((value for value in clips if value is not None), None)
    if clip is not None:
        limits.append((clip, f"clipped at {clip:g}"))
    return Curve(
        id="grad-norm",
        title="Gradient norm",
        caption="unscaled, before clipping; × marks steps with NaN or Inf gradients",
        label="norm",
        values=values,
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


def _scale_curves(axis: _Axis) -> list[Curve]:
    steps = axis.steps
    curves = [
        Curve(
            id="loss-scale",
            title="Loss scale",
            caption="logarithmic; × marks skipped steps",
            label="scale",
            values=axis.values([step.loss_scale for step in steps], positive=True),
            log=2,
            marks=axis.marks({s.sequence: "skipped" for s in steps if s.skipped}),
        )
    ]
    headroom = [headroom_bits(step) if not step.skipped else None for step in steps]
    if any(value is not None for value in headroom):
        curves.append(
            Curve(
                id="headroom",
                title="FP16 headroom",
                caption="how often the scaled gradients could double before they overflow",
                label="bits",
                values=axis.values(headroom),
            )
        )
    return curves


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
