"""What the page plots, as data: errors along the forward and the backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from mp_agent.compare.report.model import CallComparison, CandidateComparison
from mp_agent.compare.report.tensor_error import TensorError
from mp_agent.compare.report.text import named, scientific

CALLS_MAX = 4000
"""Calls that are plotted at most."""

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class ErrorCurve:
    """One line of a plot; None where there is no value, or zero, which a logarithm has not."""

    label: str
    color: str
    values: Values
    points: bool = False
    """Whether single points are drawn in place of a line."""


@dataclass(frozen=True, slots=True)
class ErrorPlot:
    """One plot over the calls of a pass."""

    id: str
    title: str
    caption: str
    names: Sequence[str]
    """Of the modules, along the axis."""
    curves: Sequence[ErrorCurve]
    limit: float
    """The unit roundoff, drawn as a line."""
    marks: Sequence[int]
    """Indices of calls with NaN or Inf that the reference does not have."""

    @property
    def description(self) -> str:
        """The plot as text, for readers who do not see it."""
        known = [value for value in self.curves[0].values if value is not None]
        ends = (
            f"largest {scientific(max(known))}, last {scientific(known[-1])}" if known else "none"
        )
        return f"{self.title}: relative error over {len(self.names)} calls: {ends}"


def plots_of(candidate: CandidateComparison) -> list[ErrorPlot]:
    """Return the plots of a candidate; none for one that failed before its first call."""
    calls = list(candidate.calls[:CALLS_MAX])
    if not calls:
        return []
    forward = _plot(
        candidate,
        "forward",
        "Forward pass",
        "relative L2 error of each call's output, in the order in which calls end",
        calls,
        [
            ErrorCurve("total", "series", [_value(call.output) for call in calls]),
            ErrorCurve("own operations", "warn", [_value(call.own) for call in calls], points=True),
        ],
        [index for index, call in enumerate(calls) if call.output.nonfinite_ratio > 0],
    )
    if candidate.keep is not None and candidate.keep.calls:
        after = _matched(calls, candidate.keep.calls)
        forward = _with(forward, ErrorCurve("with modules kept in FP32", "good", after))
    backward = [call for call in reversed(calls) if call.gradient is not None]
    if not backward:
        return [forward]
    return [
        forward,
        _plot(
            candidate,
            "backward",
            "Backward pass",
            "relative L2 error of the gradient that reaches each call's output, last call first",
            backward,
            [
                ErrorCurve("total", "series", [_value(call.gradient) for call in backward]),
                ErrorCurve(
                    "own backward",
                    "warn",
                    [_value(call.gradient_own) for call in backward],
                    points=True,
                ),
            ],
            [
                index
                for index, call in enumerate(backward)
                if call.gradient is not None and call.gradient.nonfinite_ratio > 0
            ],
        ),
    ]


def _plot(
    candidate: CandidateComparison,
    kind: str,
    title: str,
    caption: str,
    calls: Sequence[CallComparison],
    curves: Sequence[ErrorCurve],
    marks: Sequence[int],
) -> ErrorPlot:
    return ErrorPlot(
        id=f"{candidate.name}-{kind}",
        title=title,
        caption=caption,
        names=[named(call.module) for call in calls],
        curves=curves,
        limit=candidate.unit_roundoff,
        marks=marks,
    )


def _with(plot: ErrorPlot, curve: ErrorCurve) -> ErrorPlot:
    return ErrorPlot(
        plot.id,
        plot.title,
        plot.caption,
        plot.names,
        [*plot.curves, curve],
        plot.limit,
        plot.marks,
    )


def _matched(calls: Sequence[CallComparison], others: Sequence[CallComparison]) -> Values:
    """Return the errors of other calls of the same modules, in the order of `calls`."""
    waiting: dict[str, list[CallComparison]] = {}
    for call in reversed(others):
        waiting.setdefault(call.module, []).append(call)
    return [
        _value(waiting[call.module].pop().output) if waiting.get(call.module) else None
        for call in calls
    ]


def _value(error: TensorError | None) -> float | None:
    if error is None or error.nonfinite_ratio > 0:
        return None
    return error.relative_l2 if isfinite(error.relative_l2) and error.relative_l2 > 0 else None
