"""Reads what trainers print: lines with names and values, of any trainer or of a known one.

Transformers' Trainer prints Python dicts between the states of progress bars.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.columns import NUMBERS, QUANTITIES, STEP, Row, plain
from mp_agent.backtest.log.rows import EPOCH, EPOCH_STEPS
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import ROWS_MAX, LogFormat, bounded_rows, log_of_rows
from mp_agent.backtest.readers.tables import SUMMARY, step_seconds_of
from mp_agent.backtest.readers.text import NUMBER, lines_of, stamp
from mp_agent.errors import NothingToJudge

_Line = tuple[int, str]
_RowOf = Callable[[Collection[str], str], dict[str, Any] | None]
"""From the columns that the user named and a line to its values; None where it holds none."""

_TRAINING_PREFIXES = ("train_", "training_")
_NAMES = {EPOCH} | {
    prefix + name
    for quantity, names in QUANTITIES.items()
    if quantity != "time"
    for name in names
    for prefix in ("", *_TRAINING_PREFIXES)
}
"""Names of values, once they are plain. Lines bear the time in front."""
_NUMBER_NAMES = {
    prefix + name
    for quantity in NUMBERS
    for name in QUANTITIES[quantity]
    for prefix in ("", *_TRAINING_PREFIXES)
}
_COMMON_WORDS = {"norm"} | {name for each in NUMBERS[2:] for name in QUANTITIES[each]}
"""Names of values that are words of prose and code, and of other values: `Logit Scale`."""
_PAIR = re.compile(
    rf"(?<![\w./-])((?:[A-Za-z_][\w./-]* ){{0,2}}[A-Za-z_][\w./-]*)"
    rf"(?:\s*[:=]\s*|\s+)['\"]?({NUMBER})(?![\w%]|\.\d)"
)
_SAME_VALUE = frozenset(
    ("mean", "average", "avg", "running", "batch", "current", "iter", "epoch", "step", "completed")
)
"""Words before a name that leave it the same value, as capitals do (`INFO loss`); with another one,
as in `aux loss` or `Actor Loss`, it is another value."""
_EVALUATION = re.compile(
    r"(?<![\w/-])(?:val|valid|validation|eval|evaluation|test|dev)(?![\w/-])", re.IGNORECASE
)
_PLACE = re.compile(
    r"\b(?:(?:train(?:ing)?\s+)?epoch|train)\b(?:\(train\))?[:\s]*\[?\s*(?P<epoch>\d+)"
    r"(?:/\d+)?\s*\]?[\s,:|-]*(?:\d+%\|[^|]*\|\s*)?"
    r"(?:(?:iter|iteration|step|batch)\b[:\s]*)?[\[(]?\s*(?P<step>\d+)\s*/\s*(?P<total>\d+)",
    re.IGNORECASE,
)
"""Epoch, iteration and iterations in it: `Epoch: [0]  [ 20/1251]`, `Epoch 0:  4%|▍| 20/512 [`."""
_FRACTION = re.compile(
    r"(?:(?<!\d)\d+%\|[^|]*\||\b(?:iter|iteration|step)(?:\(train\))?[:\s]*\[|^\[batch=)"
    r"\s*(?P<step>\d+)\s*/\s*\d+",
    re.IGNORECASE,
)
"""The step of a progress bar, or as mmengine and Composer write it."""
_RANK = re.compile(r"^\s*\[(?:rank|default)?(\d+)\]:|\((\d+)/\d+\) Epoch ")
"""Rank as torchrun and icefall write it."""
_LINES_LOOKED_AT = 5_000
_MARKS_MIN = 3
"""Lines of steps that make a text a log, where it was not named."""
_TEXT_SUFFIXES = ("", ".log", ".txt", ".out", ".err")


@dataclass(frozen=True, slots=True)
class _Trainer:
    """How a trainer writes its lines.

    line: what begins one, with the groups step and, where there are such, epoch, total (iterations
    in the epoch), loss (without a name that others use), values (else they are the rest of the
    line). seconds_per_unit: of its `time`.
    """

    name: str
    line: re.Pattern[str]
    seconds_per_unit: float | None = None


_TIME = re.compile(rf"\btime:?\s+({NUMBER})")
_TRAINERS = (
    _Trainer("torchtitan", re.compile(r"- INFO - step:\s*(?P<step>\d+)\s+(?=loss:)")),
    _Trainer("nanogpt", re.compile(r"^iter (?P<step>\d+): (?=loss )"), 1e-3),
    _Trainer(
        "icefall",
        re.compile(
            r"\bEpoch (?P<epoch>\d+), batch (?P<step>\d+), loss\[(?P<values>[^\]]*)\]"
            r"(?:.*\](?P<more>.*))?"
        ),
    ),
    _Trainer("llm.c", re.compile(rf"^s:(?P<step>\d+) trl:(?P<loss>{NUMBER})\b")),
    _Trainer("build-nanogpt", re.compile(rf"^(?P<step>\d+) train (?P<loss>{NUMBER})$")),
    _Trainer("espnet", re.compile(r"\b(?P<epoch>\d+)epoch:train:\d+-(?P<step>\d+)batch: ")),
    _Trainer(
        "litgpt", re.compile(rf"\biter \d+ step (?P<step>\d+) \| loss train: (?P<loss>{NUMBER}),")
    ),
    _Trainer("epochs", _PLACE, 1.0),
)


def _pairs(text: str, chosen: Collection[str]) -> dict[str, str]:
    """Return the values of a line by name, as they are written; of evaluations none."""
    found: dict[str, str] = {}
    loose: dict[str, str] = {}
    for name, value in _PAIR.findall(text):
        words = name.split()
        for begin in range(len(words)):
            rest = " ".join(words[begin:])
            before = words[begin - 1] if begin else ""
            if before and not before.isupper() and before.lower() not in _SAME_VALUE:
                break
            known = rest if rest in chosen else plain(rest)
            if before and known in _COMMON_WORDS and rest not in chosen:
                break
            if known in _NAMES or rest in chosen:
                (loose if before else found).setdefault(known, value)
                break
    found = loose | found
    if found and _EVALUATION.search(_PAIR.sub(" ", text)):
        return {}
    if _EVALUATION.search(text):
        # Next to numbers of an evaluation, only those that say so are of training.
        return {
            name: value
            for name, value in found.items()
            if name not in _NUMBER_NAMES or name.startswith(_TRAINING_PREFIXES)
        }
    return found


def _row_of_trainer(trainer: _Trainer, chosen: Collection[str], line: str) -> dict[str, Any] | None:
    found = trainer.line.search(line)
    if found is None or _EVALUATION.search(line[: found.end()]):
        return None
    groups = found.groupdict()
    values = groups.get("values")
    text = line[found.end() :] if values is None else f"{values}, {groups.get('more') or ''}"
    row: dict[str, Any] = {**_pairs(text, chosen), STEP: int(groups["step"])}
    if groups.get("loss"):
        row["loss"] = groups["loss"]
    if trainer.seconds_per_unit is not None and (time := _TIME.search(text)):
        row["step_seconds"] = float(time[1]) * trainer.seconds_per_unit
    return row | _epoch(groups)


def _epoch(groups: Mapping[str, str | None]) -> dict[str, int]:
    numbers = {EPOCH: groups.get("epoch"), EPOCH_STEPS: groups.get("total")}
    return {name: int(text) for name, text in numbers.items() if text is not None}


def _row_of_any(chosen: Collection[str], line: str) -> dict[str, Any] | None:
    row: dict[str, Any] = dict(_pairs(line, chosen))
    if any(name in row for name in QUANTITIES[STEP]):
        return row
    if (found := _PLACE.search(line)) or (found := _FRACTION.search(line)):
        groups = found.groupdict()
        row |= {STEP: int(groups["step"]), **_epoch(groups)}
    return row or None


def _judged(row: Mapping[str, Any] | None, chosen: Collection[str]) -> bool:
    return row is not None and any(name in _NUMBER_NAMES or name in chosen for name in row)


def _placed(row: Mapping[str, Any]) -> bool:
    return EPOCH in row or any(name in row for name in QUANTITIES[STEP])


def _rows(
    lines: Iterable[_Line], row_of: _RowOf, chosen: Collection[str], left_out: set[str]
) -> Iterator[Row]:
    """Yield a row per line that holds a number to judge, of the rank that prints first.

    Other ranks are added to left_out.
    """
    first = ""
    for number, line in lines:
        row = row_of(chosen, line)
        if row is None or not _judged(row, chosen):
            continue
        ranks = _RANK.search(line)
        rank = (ranks[1] or ranks[2]) if ranks else ""
        first = first or rank
        if rank != first:
            left_out.add(rank)
            continue
        time_seconds = stamp(line)
        yield number, {**row, **({"timestamp": time_seconds} if time_seconds else {})}


_CELLS = re.compile(r"^\s*\|\s*([A-Za-z_][\w ./-]{0,60}?)\s*\|\s*(\S{1,60})\s*\|\s*$")
_HEADING = re.compile(r"\[(?:step|batch)=\d+[^\][]{0,200}\]:?\s*$")


def _joined(lines: Iterable[_Line]) -> Iterator[_Line]:
    """Yield lines; a table of names and values, or a heading with indented values, as one."""
    held: list[str] = []
    begin, tabular = 0, False
    for number, line in lines:
        cells = _CELLS.match(line)
        if held and ((tabular and cells) or (not tabular and line[:1] in (" ", "\t"))):
            held.append(f"{cells[1]}: {cells[2]}" if cells else line.strip())
            continue
        if held:
            yield begin, ", ".join(held)
            held = []
        if cells or _HEADING.search(line):
            begin, tabular = number, cells is not None
            held = [f"{cells[1]}: {cells[2]}" if cells else line]
        else:
            yield number, line
    if held:
        yield begin, ", ".join(held)


def _read(name: str, row_of: _RowOf, path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    chosen = frozenset(options.columns.values())
    ranks: set[str] = set()
    rows = bounded_rows(_rows(_joined(lines_of(path)), row_of, chosen, ranks))
    placed = [(line, row) for line, row in rows if _placed(row)]
    # Without a step, such as the averages of an epoch after its steps.
    unplaced = len(rows) - len(placed) if placed else 0
    rows = placed or [(line, row) for line, row in rows if row.keys() - _COMMON_WORDS]
    if not rows:
        raise NothingToJudge(
            "no line holds a loss, gradient norm or loss scale as `name value`, `name: value` or "
            "`name=value`; name one by --column loss=NAME"
        )
    notes = [f"lines of {len(ranks)} other ranks are left out"] if ranks else []
    if unplaced:
        notes.append(f"{unplaced} lines with numbers, but without a step, are left out")
    return [log_of_rows(path, name, rows, options, notes=notes)]


def _recognises(row_of: _RowOf, path: Path, head: bytes) -> bool:
    """Return whether the first lines hold steps; start-up messages may come before them."""
    if not head or path.suffix not in _TEXT_SUFFIXES or b"\0" in head:
        return False
    seen = 0
    for _, line in islice(_joined(lines_of(path)), _LINES_LOOKED_AT):
        row = row_of((), line)
        seen += row is not None and _judged(row, ()) and _placed(row)
        if seen == _MARKS_MIN:
            return True
    return False


def _format(name: str, row_of: _RowOf) -> LogFormat:
    return LogFormat(name, partial(_recognises, row_of), partial(_read, name, row_of))


CONSOLES = tuple(_format(one.name, partial(_row_of_trainer, one)) for one in _TRAINERS)
ANY_CONSOLE = _format("console", _row_of_any)


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


def _recognises_trainer(path: Path, head: bytes) -> bool:
    return _MARK.search(head) is not None


def _read_trainer(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
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


TRANSFORMERS_CONSOLE = LogFormat(_NAME, _recognises_trainer, _read_trainer)
