"""The plots of a post-mortem's page: curves over the steps, a lane per rank, bars of layers."""

from collections.abc import Iterable, Sequence
from math import log10

from mp_agent.flight.analysis import Analysis, LayerSummary
from mp_agent.flight.case import headroom_bits
from mp_agent.flight.page_parts import figure, section
from mp_agent.flight.svg import LINEAR, LOG2, LOG10, Line, Point, Span, bars, chart, lanes
from mp_agent.flight.text import number
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep

LANES_MAX = 32
"""Ranks that are shown at most."""
_WIDE = 1000.0
"""Largest over smallest loss from which on its axis is logarithmic."""

_JUMP = 10.0
"""Largest over smallest learning rate from which on its axis is logarithmic."""

_LIMIT_NAMES = {
    "grad_norm_extreme": "extreme",
    "grad_norm_high": "high",
    "grad_norm_low": "low",
}


def curves(analysis: Analysis) -> str:
    """Return loss, gradient norm and, with a scaler, loss scale and headroom over the steps."""
    span, steps = _span(analysis), analysis.history.steps
    losses = [step.get("loss") for step in steps]
    positive = [loss for loss in losses if loss is not None and loss > 0]
    wide = len(positive) == sum(loss is not None for loss in losses) and bool(positive)
    wide = wide and max(positive) > _WIDE * min(positive)
    lost = [s for s in steps if s.flag("loss_nonfinite")]
    plots = [
        figure(
            "Loss",
            "sum over the backwards of a step, mean over ranks; × marks NaN or Inf",
            chart(
                span,
                _points(steps, losses, "loss"),
                LOG10 if wide else LINEAR,
                title="Loss per step",
                bad_points=[Point(s.sequence, None, f"step {s.step}: NaN or Inf") for s in lost],
            ),
        ),
        figure(
            "Gradient norm",
            "unscaled, before clipping; × marks steps with NaN or Inf gradients",
            _norm_chart(analysis, span),
        ),
    ]
    rates = [step.get("learning_rate") for step in steps]
    if len({rate for rate in rates if rate is not None}) > 1:
        plots.append(_rate_plot(span, steps, rates))
    if any(step.loss_scale is not None for step in steps):
        plots += _scale_plots(span, steps)
    return section("What happened", "".join(plots))


def _rate_plot(span: Span, steps: Sequence[MergedStep], rates: Sequence[float | None]) -> str:
    positive = [rate for rate in rates if rate]
    every = len(positive) == sum(rate is not None for rate in rates)
    wide = every and max(positive) >= _JUMP * min(positive)
    return figure(
        "Learning rate",
        "of the optimizer's first parameter group",
        chart(
            span,
            _points(steps, rates, "learning rate"),
            LOG10 if wide else LINEAR,
            title="Learning rate per step",
        ),
    )


def rank_lanes(analysis: Analysis) -> str:
    """Return what each rank delivered, per step."""
    span = _span(analysis)
    marked = [(log, _cells(log, analysis.history.steps)) for log in analysis.evidence.ranks]
    remarkable = [item for item in marked if any(kind != "fine" for _, kind, _ in item[1])]
    shown = marked if len(marked) <= LANES_MAX else (remarkable or marked)[:LANES_MAX]
    rows = [(f"rank {log.identity.rank}", cells) for log, cells in shown]
    legend = "".join(
        f'<span class="key {kind}"></span>{text}'
        for kind, text in (
            ("fine", "delivered"),
            ("skipped", "skipped by GradScaler"),
            ("lost", "its own loss NaN or Inf"),
            ("absent", "not delivered"),
        )
    )
    hidden = len(marked) - len(shown)
    note = f'<p class="muted">{hidden} more rank(s) are not shown.</p>' if hidden else ""
    plot = lanes(span, rows, title="What each rank delivered, per step")
    return section("Ranks", f'<p class="legend">{legend}</p><figure>{plot}</figure>{note}')


def layer_bars(analysis: Analysis) -> str:
    """Return the worst layers; nothing where none was looked at."""
    if not analysis.layers:
        return ""
    norms = [layer.norm for layer in analysis.layers if layer.norm > 0]
    low, high = (log10(min(norms)), log10(max(norms))) if norms else (0.0, 0.0)
    rows = [_layer_bar(layer, low, high) for layer in analysis.layers]
    plot = bars(rows, title="Gradient norm of the worst layers")
    note = (
        f"at step {analysis.layers_step}; blue: gradient norm, logarithmic; red: share of elements "
        "that are NaN or Inf"
    )
    return section("The worst layers", figure("", note, plot))


def _norm_chart(analysis: Analysis, span: Span) -> str:
    steps = analysis.history.steps
    norms = [step.grad_norm if step.gradients_judged else None for step in steps]
    limits = [Line(value, f"{_LIMIT_NAMES[name]}: {value:g}") for name, value in analysis.limits]
    clip = next((c for s in steps if (c := s.get("clip_max_norm")) is not None), None)
    if clip is not None:
        limits.append(Line(clip, f"clipped at {clip:g}"))
    return chart(
        span,
        _points(steps, norms, "norm"),
        LOG10,
        title="Gradient norm per step",
        lines=limits,
        bad_points=[
            Point(s.sequence, None, f"step {s.step}: {s.gradient_nonfinite_elements:.0f} NaN/Inf")
            for s in steps
            if s.gradient_nonfinite_elements > 0
        ],
    )


def _scale_plots(span: Span, steps: Sequence[MergedStep]) -> list[str]:
    scales = [step.loss_scale for step in steps]
    headroom = [headroom_bits(step) if not step.skipped else None for step in steps]
    skipped = [Point(s.sequence, None, f"step {s.step}: skipped") for s in steps if s.skipped]
    plots = [
        figure(
            "Loss scale",
            "logarithmic; × marks skipped steps",
            chart(
                span,
                _points(steps, scales, "scale"),
                LOG2,
                title="Loss scale per step",
                bad_points=skipped,
            ),
        )
    ]
    if any(value is not None for value in headroom):
        plots.append(
            figure(
                "FP16 headroom",
                "how often the scaled gradients could double before they overflow",
                chart(
                    span,
                    _points(steps, headroom, "bits"),
                    LINEAR,
                    title="FP16 headroom in bits per step",
                ),
            )
        )
    return plots


def _cells(log: RankLog, steps: Sequence[MergedStep]) -> list[tuple[int, str, str]]:
    rank = log.identity.rank
    cells = []
    for step in steps:
        if rank not in step.present_ranks:
            kind, text = "absent", "not delivered"
        elif rank in step.nonfinite_loss_ranks:
            kind, text = "lost", "loss NaN or Inf"
        elif step.skipped:
            kind, text = "skipped", "skipped"
        else:
            kind, text = "fine", "delivered"
        cells.append((step.sequence, kind, f"rank {rank}, step {step.step}: {text}"))
    return cells


def _layer_bar(layer: LayerSummary, low: float, high: float) -> tuple[str, float, str, str]:
    """Return the bar of a layer, given the logarithms of the smallest and largest norm."""
    if layer.nonfinite_elements > 0:
        share = layer.nonfinite_elements / max(layer.elements, 1.0)
        text = f"{layer.nonfinite_elements:.0f} of {layer.elements:.0f} NaN/Inf"
        return layer.name, share, "bad", text
    if layer.norm <= 0:
        return layer.name, 0.0, "fine", "0"
    length = 0.15 + 0.85 * (log10(layer.norm) - low) / (high - low) if high > low else 1.0
    return layer.name, length, "fine", number(layer.norm)


def _span(analysis: Analysis) -> Span:
    steps = analysis.history.steps
    first, last = steps[0].sequence, steps[-1].sequence
    labels = {step.sequence: step.step for step in steps}
    bad = analysis.first_bad.sequence if analysis.first_bad else None
    if bad is not None:
        first, last = min(first, bad), max(last, bad)
    return Span(first, last, bad, lambda sequence: labels.get(sequence, sequence))


def _points(steps: Sequence[MergedStep], values: Iterable[float | None], name: str) -> list[Point]:
    return [
        Point(step.sequence, value, f"step {step.step}: {name} {number(value)}")
        for step, value in zip(steps, values, strict=True)
    ]
