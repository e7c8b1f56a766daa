"""A story as one HTML file: no script, nothing loaded from anywhere."""

from collections.abc import Iterable, Sequence
from html import escape
from math import log10

from mp_agent.flight.case import headroom_bits
from mp_agent.flight.findings import NOT_MEASURED, Finding
from mp_agent.flight.page_style import STYLE
from mp_agent.flight.story import LayerStanding, Story
from mp_agent.flight.svg import LINEAR, LOG2, LOG10, Line, Point, Span, bars, chart, lanes
from mp_agent.flight.words import (
    NAMES,
    STEP_HEADINGS,
    facts,
    number,
    step_cells,
    verdict,
)
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import EndReason

_LANES_MAX = 32
_WIDE = 1000.0
"""Largest over smallest loss from which on its axis is logarithmic."""

_LIMIT_NAMES = {
    "grad_norm_extreme": "extreme",
    "grad_norm_high": "high",
    "grad_norm_low": "low",
}


def as_html(story: Story) -> str:
    """Return the page."""
    identity = story.evidence.identity
    sections = [_head(story), _findings(story), _remedies(story)]
    if story.history.steps:
        sections += [_plots(story), _ranks_plot(story)]
    sections += [_layers(story), _moves(story), _steps(story), _ranks(story), _foot(story)]
    title = escape(f"Post-mortem of {identity.run}")
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(story: Story) -> str:
    kind = "bad" if story.first_bad else "good"
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(story))
    return (
        f'<header><p class="kicker">mp_agent post-mortem</p>'
        f"<h1>{escape(story.evidence.identity.run)}</h1>"
        f'<p class="verdict {kind}">{escape(verdict(story))}</p><dl>{rows}</dl></header>'
    )


def _findings(story: Story) -> str:
    if not story.findings:
        return ""
    return _section("Likely causes", "".join(map(_finding, story.findings)))


def _finding(finding: Finding) -> str:
    place = f"step {finding.step}" + (f", {finding.place}" if finding.place else "")
    follows = f"; follows from {finding.follows}" if finding.follows else ""
    arguments = "".join(
        f'<li class="{kind}">{escape(argument.text)}</li>'
        for kind, arguments in (("for", finding.speaks_for), ("against", finding.speaks_against))
        for argument in arguments
    )
    return (
        f'<article class="{finding.likelihood}"><h3><span class="tag">{finding.likelihood}</span> '
        f"{escape(finding.cause.title)}</h3>"
        f'<p class="place">{escape(place + follows)}</p><ul>{arguments}</ul></article>'
    )


def _remedies(story: Story) -> str:
    if not story.remedies:
        return ""
    items = "".join(
        f"<li>{escape(text)}</li>" for remedy in story.remedies for text in remedy.remedies
    )
    first = story.remedies[0]
    why = f'<p class="muted">{escape(first.why)}</p>'
    confirm = f'<p class="muted">To make sure: {escape(first.confirm)}</p>'
    return _section("What to do", f"<ol>{items}</ol>{why}{confirm}")


def _plots(story: Story) -> str:
    span, steps = _span(story), story.history.steps
    losses = [step.get("loss") for step in steps]
    positive = [loss for loss in losses if loss is not None and loss > 0]
    wide = len(positive) == sum(loss is not None for loss in losses) and bool(positive)
    wide = wide and max(positive) > _WIDE * min(positive)
    lost = [s for s in steps if s.flag("loss_nonfinite")]
    plots = [
        _figure(
            "Loss",
            "mean over micro-batches and ranks; × marks NaN or Inf",
            chart(
                span,
                _points(steps, losses, "loss"),
                LOG10 if wide else LINEAR,
                title="Loss per step",
                bad_points=[Point(s.sequence, None, f"step {s.step}: NaN or Inf") for s in lost],
            ),
        ),
        _figure(
            "Gradient norm",
            "unscaled, before clipping; × marks steps with NaN or Inf gradients",
            _norm_chart(story, span),
        ),
    ]
    if any(step.get("loss_scale") is not None for step in steps):
        plots += _scale_plots(span, steps)
    return _section("What happened", "".join(plots))


def _norm_chart(story: Story, span: Span) -> str:
    steps = story.history.steps
    norms = [step.grad_norm if step.gradients_judged else None for step in steps]
    limits = [Line(value, f"{_LIMIT_NAMES[name]}: {value:g}") for name, value in story.limits]
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
    scales = [step.get("loss_scale") for step in steps]
    headroom = [headroom_bits(step) if not step.skipped else None for step in steps]
    skipped = [Point(s.sequence, None, f"step {s.step}: skipped") for s in steps if s.skipped]
    plots = [
        _figure(
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
            _figure(
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


def _ranks_plot(story: Story) -> str:
    span = _span(story)
    marked = [(log, _cells(log, story.history.steps)) for log in story.evidence.ranks]
    remarkable = [item for item in marked if any(kind != "fine" for _, kind, _ in item[1])]
    shown = marked if len(marked) <= _LANES_MAX else (remarkable or marked)[:_LANES_MAX]
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
    return _section("Ranks", f'<p class="legend">{legend}</p><figure>{plot}</figure>{note}')


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


def _layers(story: Story) -> str:
    if not story.layers:
        return ""
    norms = [layer.norm for layer in story.layers if layer.norm > 0]
    low, high = (log10(min(norms)), log10(max(norms))) if norms else (0.0, 0.0)
    rows = [_layer_bar(layer, low, high) for layer in story.layers]
    plot = bars(rows, title="Gradient norm of the worst layers")
    note = (
        f"at step {story.layers_step}; blue: gradient norm, logarithmic; red: share of elements "
        "that are NaN or Inf"
    )
    return _section("The worst layers", _figure("", note, plot))


def _layer_bar(layer: LayerStanding, low: float, high: float) -> tuple[str, float, str, str]:
    """Return the bar of a layer, given the logarithms of the smallest and largest norm."""
    if layer.nonfinite_elements > 0:
        share = layer.nonfinite_elements / max(layer.elements, 1.0)
        text = f"{layer.nonfinite_elements:.0f} of {layer.elements:.0f} NaN/Inf"
        return layer.name, share, "bad", text
    if layer.norm <= 0:
        return layer.name, 0.0, "fine", "0"
    length = 0.15 + 0.85 * (log10(layer.norm) - low) / (high - low) if high > low else 1.0
    return layer.name, length, "fine", number(layer.norm)


def _moves(story: Story) -> str:
    if not story.moves:
        return ""
    rows = [
        (NAMES[m.name], number(m.long_before), number(m.just_before), number(m.at))
        for m in story.moves
    ]
    headings = ("", "6–50 steps before", "1–5 steps before", "at the step")
    marked = {index for index, move in enumerate(story.moves) if move.moved}
    return _section("What moved before it", _table(headings, rows, marked, kind="numeric"))


def _steps(story: Story) -> str:
    rows = [step_cells(step) for step in story.around]
    bad = story.first_bad.sequence if story.first_bad else None
    marked = {index for index, step in enumerate(story.around) if step.sequence == bad}
    title = "The steps around it" if story.findings else "The last steps"
    return _section(title, _table(STEP_HEADINGS, rows, marked, kind="numeric remarks"))


def _ranks(story: Story) -> str:
    logs = story.evidence.ranks
    remarkable = [log for log in logs if log.end is not EndReason.COMPLETED]
    rows = [
        (
            str(log.identity.rank),
            log.identity.host,
            log.end.name.lower(),
            log.state.phase_name,
            str(log.state.started_sequence),
        )
        for log in (remarkable or list(logs))[:_LANES_MAX]
    ]
    return _section("Where each rank stood", _table(("rank", "host", "end", "in", "step"), rows))


def _foot(story: Story) -> str:
    evidence = story.evidence
    conditions = "".join(
        f"<li>{escape(c.name)} ({escape(c.severity)}) since step {c.since_step}. "
        f"{escape(c.description)}</li>"
        for c in evidence.conditions
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in evidence.notes)
    missing = ", ".join(text for _, text in NOT_MEASURED)
    parts = [f"<h2>Conditions in force</h2><ul>{conditions}</ul>" if conditions else ""]
    parts.append(f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
    parts.append(
        f'<p class="muted">Not measured, so neither shown nor ruled out: {escape(missing)}.</p>'
    )
    return f"<footer>{''.join(parts)}</footer>"


def _span(story: Story) -> Span:
    steps = story.history.steps
    first, last = steps[0].sequence, steps[-1].sequence
    labels = {step.sequence: step.step for step in steps}
    bad = story.first_bad.sequence if story.first_bad else None
    if bad is not None:
        first, last = min(first, bad), max(last, bad)
    return Span(first, last, bad, lambda sequence: labels.get(sequence, sequence))


def _points(steps: Sequence[MergedStep], values: Iterable[float | None], name: str) -> list[Point]:
    return [
        Point(step.sequence, value, f"step {step.step}: {name} {number(value)}")
        for step, value in zip(steps, values, strict=True)
    ]


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _figure(title: str, note: str, plot: str) -> str:
    head = f"<strong>{escape(title)}</strong> " if title else ""
    return f"<figure><figcaption>{head}{escape(note)}</figcaption>{plot}</figure>"


def _table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    marked: Iterable[int] = (),
    *,
    kind: str = "",
) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    chosen = set(marked)
    body = "".join(
        f"<tr{' class=marked' if index in chosen else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for index, row in enumerate(rows)
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{table}</table></div>'
