"""Plots as inline SVG: shapes, classes and text; the page's style sheet colours them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log2, log10

WIDTH, HEIGHT = 960, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 12, 26
_TICKS = 5
_LANE = 16
_BAR = 24
_LIMIT_LABEL = 120
_NAME_CHARACTERS = 46


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a step; the note is shown when the pointer rests on it."""

    sequence: int
    value: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal line at a value, with its label."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """How values become heights: `scale` of a value, and the text of a scaled one."""

    scale: Callable[[float], float]
    text: Callable[[float], str]
    whole: bool = False
    """Whether the scale is logarithmic: ticks stand at whole numbers only."""

    def height(self, value: float | None) -> float | None:
        """Return a value's height; None for what cannot be drawn."""
        if value is None or (self.whole and value <= 0):
            return None
        return self.scale(value)


LINEAR = PlotAxis(lambda value: value, lambda at: f"{at:.4g}")
LOG10 = PlotAxis(
    log10, lambda at: f"{10.0**at:.0e}" if abs(at) > 3 else f"{10.0**at:g}", whole=True
)
LOG2 = PlotAxis(log2, lambda at: _power_of_two(at), whole=True)


@dataclass(frozen=True, slots=True)
class Span:
    """The steps that all plots of a page have in common."""

    first: int
    last: int
    bad: int | None
    """The first bad step."""
    label: Callable[[int], int]
    """From a sequence number to the trainer's step."""

    def x(self, sequence: float) -> float:
        """Return where a step lies."""
        width = max(self.last - self.first, 1)
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (sequence - self.first) / width


def chart(
    span: Span,
    points: Sequence[Point],
    axis: PlotAxis,
    *,
    title: str,
    lines: Iterable[Line] = (),
    bad_points: Iterable[Point] = (),
) -> str:
    """Return a line chart. bad_points: steps without a value, marked at the upper edge."""
    known = [(p, height) for p in points if (height := axis.height(p.value)) is not None]
    heights = [height for _, height in known]
    shown = [line for line in lines if _near(axis, line, heights)]
    low, high = _range([*heights, *(axis.scale(line.value) for line in shown)], axis)

    def y(height: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (high - height) / (high - low)

    parts = [_grid(low, high, axis, y), _steps(span, HEIGHT)]
    parts += [_limit(line, y(axis.scale(line.value)), place) for place, line in enumerate(shown)]
    parts.append(_bad_line(span, HEIGHT))
    for stretch in _stretches(known):
        path = " ".join(f"{span.x(p.sequence):.1f},{y(height):.1f}" for p, height in stretch)
        parts.append(f'<polyline class="series" points="{path}"/>')
    parts += [
        _dot(span.x(p.sequence), y(height), p.note, alone=len(known) < 60) for p, height in known
    ]
    for point in bad_points:
        parts.append(_cross(span.x(point.sequence), _TOP + 5, point.note))
    return _svg("".join(parts), HEIGHT, title)


def lanes(
    span: Span, rows: Sequence[tuple[str, Sequence[tuple[int, str, str]]]], *, title: str
) -> str:
    """Return one lane per row: its name, and cells (sequence, class, note)."""
    height = _TOP + len(rows) * (_LANE + 4) + _BOTTOM
    width = max((WIDTH - _LEFT - _RIGHT) / max(span.last - span.first, 1), 1.0)
    parts = [_steps(span, height)]
    for number, (name, cells) in enumerate(rows):
        top = _TOP + number * (_LANE + 4)
        parts.append(_text("tick left", _LEFT - 8, top + 12, name))
        for sequence, kind, note in cells:
            left = max(span.x(sequence) - width / 2, _LEFT)
            right = min(span.x(sequence) + width / 2, WIDTH - _RIGHT)
            gap = 0.6 if width > 4 else 0.0
            parts.append(
                f'<rect class="cell {kind}" x="{left:.1f}" y="{top}" '
                f'width="{max(right - left - gap, 0.6):.1f}" height="{_LANE}">{_note(note)}</rect>'
            )
    parts.append(_bad_line(span, height))
    return _svg("".join(parts), height, title)


def bars(rows: Sequence[tuple[str, float, str, str]], *, title: str) -> str:
    """Return one bar per row: name, length (0 to 1), class, and the text behind the bar."""
    left, right = 330, 190
    height = _TOP + len(rows) * _BAR
    parts = []
    for number, (name, length, kind, text) in enumerate(rows):
        top = _TOP + number * _BAR
        width = max(length * (WIDTH - left - right), 1.5)
        shown = name if len(name) <= _NAME_CHARACTERS else f"…{name[1 - _NAME_CHARACTERS :]}"
        shape = f'x="{left}" y="{top}" width="{width:.1f}" height="{_BAR - 8}" rx="2"'
        parts.append(_text("name", left - 10, top + 13, shown, name))
        parts.append(f'<rect class="bar {kind}" {shape}/>')
        parts.append(_text("value", left + width + 8, top + 13, text))
    return _svg("".join(parts), height, title)


def _svg(content: str, height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{content}</svg>"
    )


def _grid(low: float, high: float, axis: PlotAxis, y: Callable[[float], float]) -> str:
    return "".join(
        _across("grid", y(at)) + _text("tick left", _LEFT - 8, y(at) + 4, axis.text(at))
        for at in _ticks(low, high, axis)
    )


def _limit(line: Line, at: float, place: int) -> str:
    # Side by side, since limits may lie close to each other.
    x = WIDTH - _RIGHT - 4 - place * _LIMIT_LABEL
    return _across("limit", at) + _text("limit-label", x, at - 4, line.label)


def _across(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, note: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}{_note(note)}</text>'


def _steps(span: Span, height: int) -> str:
    count = min(span.last - span.first, 8) or 1
    marks = {round(span.first + (span.last - span.first) * i / count) for i in range(count + 1)}
    return "".join(
        _text("tick step", span.x(mark), height - 8, str(span.label(mark)))
        for mark in sorted(marks)
    )


def _bad_line(span: Span, height: int) -> str:
    if span.bad is None:
        return ""
    x = span.x(span.bad)
    heights = f'y1="{_TOP - 6}" y2="{height - _BOTTOM}"'
    return f'<line class="bad-line" x1="{x:.1f}" x2="{x:.1f}" {heights}/>'


def _dot(x: float, y: float, note: str, *, alone: bool) -> str:
    radius = 2.2 if alone else 1.4
    return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{_note(note)}</circle>'


def _cross(x: float, y: float, note: str) -> str:
    return f'<path class="cross" d="M{x - 3:.1f} {y - 3}l6 6m0 -6l-6 6">{_note(note)}</path>'


def _note(note: str) -> str:
    return f"<title>{escape(note)}</title>" if note else ""


def _near(axis: PlotAxis, line: Line, heights: Sequence[float]) -> bool:
    """Return whether a line is near enough to the values that it does not flatten them."""
    at = axis.height(line.value)
    if not heights or at is None:
        return False
    low, high = min(heights), max(heights)
    room = max(high - low, 1.0) * 1.2
    return low - room <= at <= high + room


def _range(heights: Sequence[float], axis: PlotAxis) -> tuple[float, float]:
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    if axis.whole:
        low, high = float(floor(low)), float(-floor(-high))
    if high - low < 1e-12 * max(abs(high), abs(low), 1e-300):
        room = 1.0 if axis.whole else abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    if not axis.whole:
        low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    return low, high


def _ticks(low: float, high: float, axis: PlotAxis) -> list[float]:
    step = _nice((high - low) / _TICKS)
    if axis.whole:
        step = max(round(step), 1)
    first = -floor(-low / step) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def _nice(step: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten: the next above `step`."""
    power = 10.0 ** floor(log10(step)) if step > 0 else 1.0
    return next((m * power for m in (1.0, 2.0, 2.5, 5.0) if m * power >= step), 10.0 * power)


def _stretches(known: Sequence[tuple[Point, float]]) -> Iterable[list[tuple[Point, float]]]:
    """Yield values of adjoining steps: a line must not cross steps that have none."""
    stretch: list[tuple[Point, float]] = []
    for point, height in known:
        if stretch and point.sequence != stretch[-1][0].sequence + 1:
            yield stretch
            stretch = []
        stretch.append((point, height))
    if stretch:
        yield stretch


def _power_of_two(at: float) -> str:
    value = 2.0**at
    return f"{value:g}" if 1 / 64 <= value < 1e6 else f"2^{at:.0f}"
