"""Reads the text logs of DeepSpeed, fairseq, Megatron and the Trainer of Transformers."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import unescape
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.columns import STEP, Row
from mp_agent.backtest.log.rows import Problems
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import (
    NOTEBOOK,
    ROWS_MAX,
    LogFormat,
    bounded_rows,
    log_of_rows,
)
from mp_agent.backtest.readers.tables import SUMMARY, step_seconds_of
from mp_agent.errors import LogError, NothingToJudge, SourceError
from mp_agent.inputs.files import parse_json, read_lines, read_text

LINE_CHARACTERS_MAX = 20_000
"""A longer line holds no step of a trainer; a progress bar may."""
_STATES_CHARACTERS_MAX = 1 << 24
"""Most characters of all states of a progress bar."""

_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
NUMBER = rf"[-+]?(?:{_DECIMAL}|nan|NaN|NAN|inf|Inf|INF|Infinity)"
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_CELL_TAG = re.compile(r"<t[hd]\b[^<>]*>")
_TAG = re.compile(r"<[^<>]*>")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line; of a progress bar, each state; of a notebook, its output.

    Raises OSError, and SourceError for a notebook that is none.
    """
    lines = (
        enumerate(_notebook_output(path), start=1)
        if path.suffix == NOTEBOOK
        else read_lines(path, _STATES_CHARACTERS_MAX)
    )
    for number, line in lines:
        for part in line.split("\r"):
            if part and len(part) <= LINE_CHARACTERS_MAX:
                yield number, _ESCAPES.sub("", part)


def _notebook_output(path: Path) -> Iterator[str]:
    """Yield the lines that the cells of a notebook have printed, rows of tables between bars."""
    content = parse_json(read_text(path))
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise SourceError("holds no list of cells, as a notebook does")
    for cell in cells:
        outputs = cell.get("outputs") if isinstance(cell, dict) else None
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, dict):
                yield from _shown(output)


def _shown(output: Mapping[str, Any]) -> Iterator[str]:
    data = output.get("data")
    shown = data if isinstance(data, dict) else {"text/plain": output.get("text")}
    page, plain = (
        "".join(map(str, text)) if isinstance(text, list) else str(text or "")
        for text in (shown.get("text/html"), shown.get("text/plain"))
    )
    rows = page.split("<tr")[1:]
    for row in rows:
        cells = [unescape(_TAG.sub("", cell)).strip() for cell in _CELL_TAG.split(row)[1:]]
        yield f"| {' | '.join(cells)} |"
    if not rows:
        yield from plain.split("\n")


def stamp(line: str) -> float | None:
    """Return the time that a line bears near its beginning, as Unix seconds; None without one."""
    found = _STAMP.search(line, 0, 120)
    if found is None:
        return None
    date, clock, fraction = found.groups()
    try:
        # Without a zone it is only compared with other lines.
        seconds = datetime.fromisoformat(f"{date}T{clock}+00:00").timestamp()
    except ValueError:
        return None
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)


_DEEPSPEED_NAME = "deepspeed"
_STEP = re.compile(rf"step=(\d+), skipped=(\d+), lr=\[({NUMBER})")
_LOSS = re.compile(rf"steps: (\d+) loss: ({NUMBER})(?: iter time \(s\): ({NUMBER}))?")
_OVERFLOW = r"OVERFLOW! Rank 0 Skipping step\. Attempted loss scale: "
_DEEPSPEED_OVERFLOW = re.compile(rf"{_OVERFLOW}({NUMBER})")
_OVERFLOW_BEFORE = re.compile(rf"Reducing dynamic loss scale from ({NUMBER}) to")
_DEEPSPEED_MARKS = re.compile(
    rb"step=\d+, skipped=\d+, lr=\[|OVERFLOW! Rank \d+ Skipping step|Reducing dynamic loss scale"
)


def _recognises_deepspeed(path: Path, head: bytes) -> bool:
    return _DEEPSPEED_MARKS.search(head) is not None


def _read_deepspeed(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    rows = bounded_rows(_rows_deepspeed(path))
    if not rows:
        raise LogError("holds no line `step=N, skipped=N, lr=[…]` and no overflow")
    if any("skipped" in row for _, row in rows):
        # Each skip has its own line, with its scale.
        for _, row in rows:
            row.pop("skipped_cumulative", None)
    return [log_of_rows(path, _DEEPSPEED_NAME, rows, options, problems=Problems())]


def _rows_deepspeed(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    step = 0
    for number, line in lines_of(path):
        if found := _STEP.search(line):
            step = int(found[1])
            row: dict[str, Any] = {
                "skipped_cumulative": float(found[2]),
                "learning_rate": found[3],
            }
        elif found := _LOSS.search(line):
            step = int(found[1])
            row = {"loss": float(found[2])}
            if found[3]:
                row["step_seconds"] = float(found[3])
        elif found := _DEEPSPEED_OVERFLOW.search(line) or _OVERFLOW_BEFORE.search(line):
            row = {"loss_scale": float(found[1]), "skipped": 1.0}
        else:
            continue
        time_seconds = stamp(line)
        yield number, {"step": step, **row, **({"timestamp": time_seconds} if time_seconds else {})}


DEEPSPEED = LogFormat(_DEEPSPEED_NAME, _recognises_deepspeed, _read_deepspeed)


_FAIRSEQ_NAME = "fairseq"
_FAIRSEQ_FIELD = re.compile(rf"\b([a-z][a-z0-9_]*)=({NUMBER})(?=[,\s]|$)")
_FAIRSEQ_OVERFLOW = re.compile(
    rf"overflow detected, (?:ignoring gradient, )?setting (?:loss )?scale to:? (?:from \S+ to )?"
    rf"({NUMBER})"
)
_SCALE_FACTOR = 2.0
"""By which an overflow divides the scale: the note has the one after it."""
_FAIRSEQ_MARKS = re.compile(rb"num_updates\"?[=:]\s*\"?\d|overflow detected, (?:ignoring|setting)")


def _recognises_fairseq(path: Path, head: bytes) -> bool:
    return _FAIRSEQ_MARKS.search(head) is not None


def _read_fairseq(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    rows = bounded_rows(_rows_fairseq(path))
    if not rows:
        raise LogError("holds no line with num_updates and no overflow")
    return [log_of_rows(path, _FAIRSEQ_NAME, rows, options, problems=Problems())]


def _rows_fairseq(path: Path) -> Iterator[Row]:
    step = 0
    for number, line in lines_of(path):
        row: dict[str, Any] = {}
        if found := _FAIRSEQ_OVERFLOW.search(line):
            row = {"loss_scale": float(found[1]) * _SCALE_FACTOR, "skipped": 1.0}
        elif "num_updates" in line and "valid" not in line and "| train |" not in line:
            row = _fields(line)
            if "num_updates" not in row:
                continue
            step = int(float(row.pop("num_updates")))
        if not row:
            continue
        time_seconds = stamp(line)
        yield number, {"step": step, **row, **({"timestamp": time_seconds} if time_seconds else {})}


def _fields(line: str) -> dict[str, Any]:
    """Return the numbers of a line; one that cannot be read is left out."""
    begin = line.find("{")
    if begin < 0:
        return dict(_FAIRSEQ_FIELD.findall(line))
    try:
        content = parse_json(line[begin:])
        fields = dict(content)
        return {**fields, "num_updates": float(fields["num_updates"])}
    except (SourceError, TypeError, ValueError, KeyError, OverflowError):
        return {}


FAIRSEQ = LogFormat(_FAIRSEQ_NAME, _recognises_fairseq, _read_fairseq)


_MEGATRON_NAME = "megatron"
_LINE = re.compile(r"iteration\s+(\d+)\s*/\s*\d+\s*\|")
_MEGATRON_FIELD = re.compile(
    rf"\|\s*+([a-zA-Z][\w ()-]{{0,80}}?)(?::\s*+|\s+)({NUMBER})\s*(?=\||$)"
)
_SKIPPED, _MILLISECONDS = "number of skipped iterations", "elapsed time per iteration (ms)"
_SECONDS = "elapsed time per iteration (s)"
_RENAMED = {
    "lm loss": "loss",
    "mlm loss": "loss",
    "loss scale": "loss_scale",
    "grad norm": "grad_norm",
    "learning rate": "learning_rate",
    _SECONDS: "step_seconds",
}


def _recognises_megatron(path: Path, head: bytes) -> bool:
    return (
        re.search(rb"iteration\s+\d+\s*/\s*\d+\s*\|.*elapsed time per iteration", head) is not None
    )


def _read_megatron(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    rows = bounded_rows(_rows_megatron(path))
    if not rows:
        raise LogError("holds no line `iteration N/ TOTAL | …`")
    return [log_of_rows(path, _MEGATRON_NAME, rows, options, problems=Problems())]


def _rows_megatron(path: Path) -> Iterator[Row]:
    for number, line in lines_of(path):
        found = _LINE.search(line)
        if found is None:
            continue
        fields: dict[str, Any] = {}
        for name, value in _MEGATRON_FIELD.findall(line[found.end() - 1 :]):
            fields[_RENAMED.get(name.strip(), name.strip())] = value
        if _SKIPPED in fields:
            fields["skipped_since_last"] = fields.pop(_SKIPPED)
        if _MILLISECONDS in fields:
            fields["step_seconds"] = float(fields.pop(_MILLISECONDS)) / 1000
        time_seconds = stamp(line)
        if time_seconds is not None:
            fields["timestamp"] = time_seconds
        yield number, {"step": int(found[1]), **fields}


MEGATRON = LogFormat(_MEGATRON_NAME, _recognises_megatron, _read_megatron)


_TRAINER_NAME = "transformers-console"
_EVENT = re.compile(
    r"\{(?P<dict>'[^{}]*)\}"
    rf"|{_OVERFLOW}(?P<scale>{NUMBER})"
    r"|(?<!\d)(?<!: )(?<!:  )(?<!:   )\d+%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+) \["
    r"(?:[^\]\r]{0,60}, +(?P<rate>\d+\.\d+)(?P<unit>s/it|it/s))?"
)
"""A dict, an overflow of DeepSpeed, or a bar without a name and a colon before it, as that of the
training is."""
_ITEM = re.compile(rf"'([^']+)': '?({NUMBER})'?(?=,|$)")
_MARK = re.compile(rb"\{(?:'[^{}]*, )?'(?:loss|grad_norm)': [^{}]*'epoch': ")
_QUANTITIES = ("loss", "grad_norm")
_SKIPPED_STEP = "skipped"


@dataclass(frozen=True, slots=True)
class _Bar:
    """One state of a progress bar."""

    step: int
    total: int
    step_seconds: float | None


@dataclass(slots=True)
class _Logged:
    """A printed dict or an overflow, and the bars before and after it."""

    line: int
    values: dict[str, float]
    before: _Bar | None
    after: _Bar | None = None


def _recognises_trainer(path: Path, head: bytes) -> bool:
    return _MARK.search(head) is not None


def _read_trainer(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    logged = list(islice(_logged(path), ROWS_MAX))
    trained = [one for one in logged if any(name in one.values for name in _QUANTITIES)]
    if not trained:
        raise NothingToJudge("holds no dict with 'loss' or 'grad_norm' as Trainer prints it")
    bars = _bars(trained)
    kept = [one for one in logged if _SKIPPED_STEP in one.values or one in trained]
    rows: list[Row] = [(one.line, one.values) for one in kept]
    if bars is not None:
        rows = list(_placed(kept, bars))
    seconds = [step_seconds_of(one.values) for one in logged if SUMMARY in one.values]
    log = log_of_rows(path, _TRAINER_NAME, rows, options)
    return [replace(log, step_seconds=seconds[-1] if seconds else None)]


def _placed(logged: Sequence[_Logged], bars: Sequence[_Bar]) -> Iterator[Row]:
    """Yield what was logged with its step: of a dict that of its bar, of an overflow the next."""
    waiting = iter(bars)
    total, step = bars[0].total, 0
    for one in logged:
        if _SKIPPED_STEP not in one.values:
            bar = next(waiting)
            step = bar.step
            yield one.line, {**one.values, STEP: step, "step_seconds": bar.step_seconds}
            continue
        if one.before is not None and one.before.total == total:
            step = max(step, one.before.step + 1)
        elif one.after is not None and one.after.total == total:
            step = max(step, one.after.step)
        yield one.line, {**one.values, STEP: step}


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
            if event["step"] is not None:
                bar = _Bar(int(event["step"]), int(event["total"]), _step_seconds(event))
                if waiting is not None:
                    waiting.after = bar
                    yield waiting
                    waiting = None
                continue
            if waiting is not None:
                yield waiting
            if event["scale"] is not None:
                values = {"loss_scale": float(event["scale"]), _SKIPPED_STEP: 1.0}
                waiting = _Logged(number, values, bar)
                continue
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


TRANSFORMERS_CONSOLE = LogFormat(_TRAINER_NAME, _recognises_trainer, _read_trainer)
