"""The last steps of a run as curves for a terminal, each character for one or more steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Facts = Mapping[str, Any]
"""A part of the JSON of docs/api.md."""
STYLES = {"critical": "bold red", "warning": "yellow", "info": "blue"}
"""How rich shows a severity."""
NONFINITE = {
    "loss": "loss",
    **dict.fromkeys(("grad_norm", "grad_abs_max", "clip_coefficient"), "gradients"),
}
"""By value, the quantity that has to be finite for it."""
_BARS = "▁▂▃▄▅▆▇█"
_LOWEST = 2.0**-24
"""FP16's smallest number: lower values are drawn at its height."""
_OTHER_COLUMNS = 48
"""Width of a curve's name and numbers in characters."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Loss, loss scale and gradient norm over the last steps, as far as they were observed.

    Values beyond a threshold have the colour of its alert.
    """

    history: Facts
    thresholds: Mapping[str, float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw them in the width that their numbers leave."""
        steps = self.history["step"]
        table = Table(box=None, pad_edge=False, title=f"steps {steps[0]} to {steps[-1]}")
        table.title_justify = "left"
        for column in ("", "", "smallest", "largest", "now"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        characters = max(options.max_width - _OTHER_COLUMNS, 10)
        for name, is_log, worst in (
            ("loss", False, max),
            ("loss_scale", True, min),
            ("grad_norm", True, max),
        ):
            known = [value for value in self.history[name] if value is not None]
            if known:
                shown = _worst_of_groups(self.history[name], characters, worst)
                table.add_row(
                    name.replace("_", " "),
                    self._curve(name, shown, is_log),
                    short(min(known)),
                    short(max(known)),
                    self._now(name, known[-1]),
                )
        yield table

    def _now(self, name: str, last_known: float) -> Text:
        """Return the last value, unless it is NaN or Inf now; an older agent does not say so."""
        broken = self.history.get(f"{NONFINITE.get(name)}_nonfinite", ())
        seen = zip(self.history[name], broken, strict=False)
        flags = [bad for value, bad in seen if bad or value is not None]
        return (
            Text("NaN, Inf", STYLES["critical"])
            if flags[-1:] == [True]
            else Text(short(last_known))
        )

    def _curve(self, name: str, values: Sequence[float | None], is_log: bool) -> Text:
        heights = [None if value is None else _height(value, is_log) for value in values]
        known = [height for height in heights if height is not None]
        low, span = min(known), max(known) - min(known)
        drawn = Text()
        for value, height in zip(values, heights, strict=True):
            if value is None or height is None:
                drawn.append(" ")
                continue
            share = (height - low) / span if span else 0.5
            bar = _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]
            drawn.append(bar, _beyond(name, value, self.thresholds))
        return drawn


def _worst_of_groups(
    values: Sequence[float | None], count: int, worst: Callable[[Sequence[float]], float]
) -> list[float | None]:
    """Return values unchanged, or the worst of each of `count` consecutive groups."""
    count = min(count, len(values))
    bounds = [len(values) * at // count for at in range(count + 1)]
    groups = [
        [value for value in values[begin:end] if value is not None]
        for begin, end in pairwise(bounds)
    ]
    return [worst(group) if group else None for group in groups]


def _height(value: float, is_log: bool) -> float:
    return log(max(value, _LOWEST)) if is_log else value


def _beyond(name: str, value: float, thresholds: Mapping[str, float]) -> str:
    """Return the style of the most severe threshold that a value is beyond."""
    limits = {
        "loss_scale": (
            ("loss_scale_floor", "critical", -1),
            ("loss_scale_very_low", "warning", -1),
        ),
        "grad_norm": (
            ("grad_norm_extreme", "critical", 1),
            ("grad_norm_vanished", "critical", -1),
            ("grad_norm_high", "warning", 1),
            ("grad_norm_very_low", "warning", -1),
            ("grad_norm_low", "info", -1),
        ),
    }
    for threshold, severity, sign in limits.get(name, ()):
        if threshold in thresholds and sign * value > sign * thresholds[threshold]:
            return STYLES[severity]
    return ""


def short(value: Any) -> str:
    """Return a value in few characters; a dash for an unknown one."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)
