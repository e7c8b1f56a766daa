"""Reads the console of Transformers' Trainer: Python dicts between the states of progress bars."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.columns import STEP
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import ROWS_MAX, LogFormat, log_of_rows
from mp_agent.backtest.readers.tables import SUMMARY, step_seconds_of
from mp_agent.backtest.readers.text import NUMBER, lines_of
from mp_agent.errors import NothingToJudge

_NAME = "transformers-console"
_EVENT = re.compile(
    r"\{(?P<dict>'[^{}]*)\}"
    r"|(?<!\d)(?<!: )(?<!:  )(?<!:   )\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+) \["
    r"(?:[^\]\r]{0,60}, +(?P<rate>\d+\.\d+)(?P<unit>s/it|it/s))?"
)
"""A dict, or a bar without a name and a colon before it, as that of the training is."""
_ITEM = re.compile(rf"'([^']+)': '?({NUMBER})'?(?=,|$)")
_MARK = re.compile(rb"\{(?:'[^{}]*, )?'(?:loss|grad_norm)': [^{}]*'epoch': ")
_QUANTITIES = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True)
class _Bar:
    """One state of a progress bar."""

    step: int
    total: int
    step_seconds: float | None


@dataclass(slots=True)
class _Logged:
    """A printed dict, and the bars before and after it."""

    line: int
    values: dict[str, float]
    before: _Bar | None
    after: _Bar | None = None


def _recognises(path: Path, head: bytes) -> bool:
    return _MARK.search(head) is not None


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    logged = list(islice(_logged(path), ROWS_MAX))
    trained = [one for one in logged if any(name in one.values for name in _QUANTITIES)]
    if not trained:
        raise NothingToJudge("holds no dict with 'loss' or 'grad_norm' as Trainer prints it")
    bars = _bars(trained)
    rows: list[tuple[int, dict[str, Any]]] = [(one.line, one.values) for one in trained]
    if bars is not None:
        rows = [
            (line, {**row, STEP: bar.step, "step_seconds": bar.step_seconds})
            for (line, row), bar in zip(rows, bars, strict=True)
        ]
    seconds = [step_seconds_of(one.values) for one in logged if SUMMARY in one.values]
    return [log_of_rows(path, _NAME, rows, options, step_seconds=seconds[-1] if seconds else None)]


def _logged(path: Path) -> Iterator[_Logged]:
    bar: _Bar | None = None
    waiting: _Logged | None = None
    for number, line in lines_of(path):
        events = list(_EVENT.finditer(line))
        if waiting is not None and not events and line.strip():
            # Of bars that come later than the next text, none has the step of the dict.
            yield waiting
            waiting = None
        for event in events:
            if event["dict"] is None:
                bar = _Bar(int(event["step"]), int(event["total"]), _step_seconds(event))
                if waiting is not None:
                    waiting.after = bar
                    yield waiting
                    waiting = None
                continue
            if waiting is not None:
                yield waiting
            values = {name: float(value) for name, value in _ITEM.findall(event["dict"])}
            waiting, bar = _Logged(number, values, bar), None
    if waiting is not None:
        yield waiting


def _step_seconds(bar: re.Match[str]) -> float | None:
    rate = float(bar["rate"] or 0.0)
    if not rate:
        return None
    return rate if bar["unit"] == "s/it" else 1 / rate


def _bars(logged: Sequence[_Logged]) -> list[_Bar] | None:
    """Return the bar with the step of each dict; None where the bars do not distinguish them.

    The bar is drawn again after each dict, with the step of the dict; a bar before it may lag
    behind. Bars with another total are those of evaluations.
    """
    near = [bar for one in logged for bar in (one.after, one.before) if bar is not None]
    if not near:
        return None
    total = Counter(bar.total for bar in near).most_common(1)[0][0]
    bars = [
        next((bar for bar in (one.after, one.before) if bar and bar.total == total), None)
        for one in logged
    ]
    known = [bar for bar in bars if bar is not None]
    apart = len(known) == len(bars) and all(a.step != b.step for a, b in pairwise(known))
    return known if apart else None


TRANSFORMERS_CONSOLE = LogFormat(_NAME, _recognises, _read)
