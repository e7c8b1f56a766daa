"""Loss curves as SVG."""

from collections.abc import Sequence
from math import isfinite, log10

WIDTH, HEIGHT, LEFT, BOTTOM = 320, 180, 44, 24
COLORS = {False: "#c0392b", True: "#1f6fb2"}
_LOWEST, _HIGHEST = 1e-3, 1e3


def panel(title: str, courses: Sequence[tuple[bool, Sequence[float]]]) -> str:
    """Return one plot of losses over steps; a curve ends where its loss is lost."""
    lines = "".join(_line(course, COLORS[guarded]) for guarded, course in courses)
    ticks = "".join(
        f'<text x="{LEFT - 6}" y="{_y(10.0**power) + 4:.1f}" text-anchor="end">1e{power}</text>'
        f'<path d="M{LEFT} {_y(10.0**power):.1f}H{WIDTH}" stroke="#8884" fill="none"/>'
        for power in (-3, -1, 1, 3)
    )
    return (
        f'<svg x="{{x}}" y="{{y}}" width="{WIDTH}" height="{HEIGHT}">'
        f'<text x="{LEFT}" y="14" font-weight="bold">{title}</text>{ticks}{lines}</svg>'
    )


def page(panels: Sequence[str], columns: int) -> str:
    """Return all plots as one picture."""
    rows = -(-len(panels) // columns)
    placed = "".join(
        text.replace("{x}", str(index % columns * (WIDTH + 12))).replace(
            "{y}", str(index // columns * (HEIGHT + 12) + 22)
        )
        for index, text in enumerate(panels)
    )
    width, height = columns * (WIDTH + 12), rows * (HEIGHT + 12) + 22
    legend = (
        f'<text x="{LEFT}" y="16" fill="{COLORS[False]}">without the guard</text>'
        f'<text x="{LEFT + 130}" y="16" fill="{COLORS[True]}">with the guard</text>'
        f'<text x="{LEFT + 250}" y="16">held-out loss by step, one line per seed</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f"{legend}{placed}</svg>\n"
    )


def _line(course: Sequence[float], color: str) -> str:
    step_width = (WIDTH - LEFT) / max(len(course) - 1, 1)
    points = []
    for step, loss in enumerate(course):
        if not isfinite(loss):
            break
        points.append(f"{LEFT + step * step_width:.1f},{_y(loss):.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" opacity=".7"/>'


def _y(loss: float) -> float:
    bounded = min(max(loss, _LOWEST), _HIGHEST)
    share = (log10(bounded) - log10(_LOWEST)) / (log10(_HIGHEST) - log10(_LOWEST))
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - 24)
