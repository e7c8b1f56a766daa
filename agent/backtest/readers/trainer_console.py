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
)
"""A dict, or a bar without a name and a colon before it, as that of the training is."""
_ITEM = re.compile(rf"'([^']+)': '?({NUMBER})'?(?=,|$)")
_MARK = re.compile(rb"\{(?:'[^{}]*, )?'(?:loss|grad_norm)': [^{}]*'epoch': ")
_QUANTITIES = ("loss", "grad_norm")


@dataclass(slots=True)
class _Logged:
    """A printed dict, and step and total of the bars before and after it."""

    line: int
    values: dict[str, float]
    before: tuple[int, int] | None
    after: tuple[int, int] | None = None


def _recognises(path: Path, head: bytes) -> bool:
    return _MARK.search(head) is not None


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    logged = list(islice(_logged(path), ROWS_MAX))
    trained = [one for one in logged if any(name in one.values for name in _QUANTITIES)]
    if not trained:
        raise NothingToJudge("holds no dict with 'loss' or 'grad_norm' as Trainer prints it")
    steps = _steps(trained)
    rows: list[tuple[int, dict[str, Any]]] = [(one.line, one.values) for one in trained]
    if steps is not None:
        rows = [(line, {**row, STEP: step}) for (line, row), step in zip(rows, steps, strict=True)]
    seconds = [step_seconds_of(one.values) for one in logged if SUMMARY in one.values]
    return [log_of_rows(path, _NAME, rows, options, step_seconds=seconds[-1] if seconds else None)]


def _logged(path: Path) -> Iterator[_Logged]:
    bar: tuple[int, int] | None = None
    waiting: _Logged | None = None
    for number, line in lines_of(path):
        for event in _EVENT.finditer(line):
            if event["dict"] is None:
                bar = int(event["step"]), int(event["total"])
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


def _steps(logged: Sequence[_Logged]) -> list[int] | None:
    """Return the step of each dict; None where the bars do not distinguish them.

    The bar is drawn again after each dict, with the step of the dict; a bar before it may lag
    behind. Bars with another total are those of evaluations.
    """
    bars = [bar for one in logged for bar in (one.after, one.before) if bar is not None]
    if not bars:
        return None
    total = Counter(total for _, total in bars).most_common(1)[0][0]
    steps = [
        next((bar[0] for bar in (one.after, one.before) if bar and bar[1] == total), None)
        for one in logged
    ]
    known = [step for step in steps if step is not None]
    apart = len(known) == len(steps) and all(a != b for a, b in pairwise(known))
    return known if apart else None


TRANSFORMERS_CONSOLE = LogFormat(_NAME, _recognises, _read)
