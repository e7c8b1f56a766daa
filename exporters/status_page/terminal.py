"""The status of runs as text for a terminal, with curves of the last steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mp_agent.report.numbers import NONE, counted
from mp_agent.report.terminal import SEVERITIES

Facts = Mapping[str, Any]
"""A part of the JSON of docs/api.md."""
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
_RANKS_SHOWN = 16


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
            Text("NaN, Inf", SEVERITIES["critical"])
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
            return SEVERITIES[severity]
    return ""


def short(value: Any) -> str:
    """Return a value in few characters; a dash for an unknown one."""
    if value is None:
        return NONE
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


LAYER_SORTS = ("layer", "grad_norm", "grad_abs_max", "zero_ratio", "nonfinite_elements")

_LAYER_TITLES = ("layer", "norm", "largest", "zeros", "non-finite")
_RANK_COLUMNS = {
    "rank": "rank",
    "host": "host",
    "state": "state",
    "phase": "phase",
    "step": "step",
    "lag": "lag",
    "compute_seconds": "before first collective, s",
    "loss": "loss",
}


def run_panel(
    run: Facts,
    history: Facts | None,
    thresholds: Mapping[str, float],
    *,
    sort: str,
    layers: int,
    now_unix_seconds: float,
    url: str = "",
) -> Panel:
    """Return one run as a panel, in the order of the status page.

    url: of the agent, for addresses of its pages.
    """
    conditions, summary = run["conditions"], run["summary"]
    style = SEVERITIES.get(conditions[0]["severity"], "") if conditions else ""
    parts: list[RenderableType] = [Text(run["verdict"], style=style or "bold")]
    if summary is not None:
        parts += [_numbers(summary, now_unix_seconds), *_incident(summary), *_trackers(summary)]
    parts += [*_postmortem(run, url), *map(_condition, conditions)]
    if history is not None and history["step"]:
        parts.append(Curves(history, thresholds))
    if layers and run["layers"]:
        parts.append(_layers(run["layers"], sort, layers, run["layers_omitted"]))
        parts += _interval(summary or {})
    parts += [_ranks(run["ranks"]), _agent(run["agent"], run["ranks"])]
    spaced = [item for part in parts for item in (part, Text())][:-1]
    return Panel(Group(*spaced), title=escape(run["run"]), border_style=style)


def _numbers(summary: Facts, now_unix_seconds: float) -> Text:
    names = ("step", "phase", "loss", "loss_scale", "grad_norm", "clip_coefficient")
    shown = [
        f"{name.replace('_', ' ')} {_present(summary, name)}"
        for name in (*names, "learning_rate")
        if summary[name] is not None or _nonfinite_since(summary, name) is not None
    ]
    shown.append(f"coverage {summary['coverage']:.0%}")
    if (last := summary["last_step_time_unix_seconds"]) is not None:
        shown.append(f"last step {max(now_unix_seconds - last, 0.0):.0f} s ago")
    shown.append(f"{counted(summary['world_size'], 'rank')} on {counted(summary['nodes'], 'node')}")
    text = Text("   ".join(shown))
    text.highlight_regex(r"NaN or Inf since step \d+", SEVERITIES["critical"])
    return text


def _nonfinite_since(summary: Facts, name: str) -> int | None:
    """Return since which step a value is NaN or Inf; older agents do not say so."""
    quantity = NONFINITE.get(name)
    return None if quantity is None else summary.get(f"{quantity}_nonfinite_since_step")


def _present(summary: Facts, name: str) -> str:
    """Return a value, or that there is none now, and the step of one that is not of the last."""
    value, step = short(summary[name]), summary.get(f"{name}_step")
    if (since := _nonfinite_since(summary, name)) is not None:
        last = "" if summary[name] is None else f" (last {value})"
        return f"NaN or Inf since step {since}{last}"
    return value if step in (None, summary["step"]) else f"{value} (step {step})"


def _incident(summary: Facts) -> list[Text]:
    """Return a line for missing ranks and one for the first non-finite value."""
    lines = []
    if missing := summary["missing_ranks"]:
        shown = ", ".join(map(str, missing[:_RANKS_SHOWN]))
        more = f" and {len(missing) - _RANKS_SHOWN} more" if missing[_RANKS_SHOWN:] else ""
        lines.append(f"missing ranks: {shown}{more}")
    if (first := summary["first_nonfinite"]) is not None:
        rank = f"rank {first['rank']}" if first["rank"] else ""
        places = (f"step {first['step']}", first["phase"], rank, first["layer"])
        lines.append(f"first non-finite value: {', '.join(filter(None, places))}")
    return [Text(line, "yellow") for line in lines]


def _trackers(summary: Facts) -> list[Text]:
    """Return a line for each experiment tracker; an older agent reports none."""
    return [
        Text(f"in {at['tracker']}: {', '.join(filter(None, (at['name'], at['url'])))}")
        for at in summary.get("trackers", ())
    ]


def _postmortem(run: Facts, url: str) -> list[Text]:
    """Return what the post-mortem of the run found, once for all its critical conditions."""
    # An older agent has no post-mortems.
    found = filter(None, (condition.get("postmortem") for condition in run["conditions"]))
    page = f"{url}{run['pages']['postmortem']}"
    return [Text(f"Post-mortem: {text} {page}") for text in dict.fromkeys(found)]


def _condition(condition: Facts) -> Text:
    severity = condition["severity"]
    head = Text.assemble(
        (severity, SEVERITIES.get(severity, "")),
        (f" {condition['name']}", "bold"),
        f" since step {condition['since_step']}",
        f", rank {condition['rank']}" if condition["rank"] else "",
        f", {condition['layer']}" if condition["layer"] else "",
    )
    text = condition["description"] or condition["summary"]
    lines = (
        head,
        Text(text),
        Text(f"What to do: {condition['remedy']}"),
        Text(f"More: mp-agent explain {condition['name']}"),
    )
    return Text("\n").join(lines)


def _layers(rows: Sequence[Facts], sort: str, count: int, omitted: int) -> Table:
    """Return the first layers by a column; those without a value come last."""
    known = [row for row in rows if row[sort] is not None]
    unknown = [row for row in rows if row[sort] is None]
    known.sort(key=lambda row: row[sort], reverse=sort != "layer")
    # Where gradients are not finite, norms are old, and the layer that was so first matters.
    found = sorted(
        (*known, *unknown),
        key=lambda row: (not row.get("first_nonfinite"), not row["nonfinite_elements"]),
    )
    shown = found[:count]
    by = _LAYER_TITLES[LAYER_SORTS.index(sort)]
    table = Table(box=None, pad_edge=False)
    table.title = f"{len(shown)} of {len(rows) + omitted} layers, by {by}"
    table.title_justify = "left"
    stale = any(_norm_is_old(row) for row in shown)
    for title in (*_LAYER_TITLES, *(("norm of step",) if stale else ())):
        table.add_column(title, justify="left" if title == "layer" else "right")
    for row in shown:
        values = (
            short(row["grad_norm"]),
            short(row["grad_abs_max"]),
            NONE if row["zero_ratio"] is None else f"{row['zero_ratio']:.1%}",
            short(row["nonfinite_elements"]),
            *((short(row["grad_norm_step"]),) if stale else ()),
        )
        style = SEVERITIES["critical"] if row["nonfinite_elements"] else ""
        table.add_row(escape(row["layer"]), *values, style=style)
    return table


def _norm_is_old(row: Facts) -> bool:
    """Return whether a layer's norm is of an earlier step than its latest sample."""
    step = row.get("grad_norm_step")
    return step is not None and step != row["step"]


def _ranks(rows: Sequence[Facts]) -> Table:
    table = Table(box=None, pad_edge=False, title="ranks of this node", title_justify="left")
    for title in _RANK_COLUMNS.values():
        table.add_column(title, justify="right")
    for row in rows:
        state = "up" if row["up"] else "ended" if row["phase"] == "ended" else "gone"
        cells = {**row, "state": state}
        style = "yellow" if state == "gone" else ""
        table.add_row(*(escape(short(cells[name])) for name in _RANK_COLUMNS), style=style)
    return table


def _interval(summary: Facts) -> list[Text]:
    """Return on which steps layers are measured, and why on fewer than was set.

    An older agent does not say so.
    """
    steps, shortest = map(summary.get, ("layer_interval_steps", "layer_interval_shortest_steps"))
    if steps is None or shortest is None:
        return []
    line = f"layers are measured on every {short(steps)} steps"
    if steps <= shortest:
        return [Text(line)]
    because = "since measuring took more of the step time than overhead_budget allows"
    text = Text(f"{line} instead of {short(shortest)}, {because}", "yellow")
    if (every := summary.get("measuring_interval_steps") or 1) > 1:
        text.append(f"; gradients on every {short(every)} steps")
    return [text]


def _agent(agent: Facts, ranks: Sequence[Facts]) -> Text:
    """Return the node agent's own health in a line, with problems highlighted."""
    troubles = {
        "probe errors": agent["probe_errors"],
        "setting errors": agent["setting_errors"],
        "records dropped": agent["records_dropped"],
        "series dropped": agent["series_dropped"],
        "failed pushes": agent["push_failures"],
        "reports given up": agent["reports_dropped"],
        "flight records not written": agent["flight_errors"],
    }
    line = Text(f"node agent {agent['version']}: probe time {agent['probe_seconds']:.3g} s")
    # Of the rank whose probe takes most; an older agent does not say so.
    shares = [share for rank in ranks if (share := rank.get("overhead_ratio")) is not None]
    if shares:
        line.append(f", {100 * max(shares):.2g} % of the step time")
    for name, count in troubles.items():
        line.append(", ")
        line.append(f"{name} {count}", "yellow" if count else "")
    if agent["unsupported"]:
        line.append(f", not measured: {', '.join(agent['unsupported'])}", "yellow")
    return line
