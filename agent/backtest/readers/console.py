"""Reads what trainers print: lines with names and values, of any trainer or of a known one."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.columns import NUMBERS, QUANTITIES, STEP, Row, plain
from mp_agent.backtest.log.rows import EPOCH, EPOCH_STEPS
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import NOTEBOOK, LogFormat, bounded_rows, log_of_rows
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
_VALUE = (
    r"(?<![\w./-])((?:[A-Za-z_][\w./-]* ){0,2}[A-Za-z_][\w./-]*)"
    rf"['\"]?(?:\s*[:=]\s*|\s+)['\"]?({NUMBER})"
)
_PAIR = re.compile(rf"{_VALUE}(?![\w%]|\.\d)")
_PAIR_OR_SHARE = re.compile(rf"{_VALUE}%?(?!\w|\.\d)")
_SAME_VALUE = frozenset(
    ("mean", "average", "avg", "running", "batch", "current", "iter", "epoch", "step", "completed")
)
"""Words before a name that leave it the same value; with another one, as in `aux loss` or
`Actor Loss`, it is another value."""
_LEVELS = frozenset(("debug", "info", "notice", "warning", "error", "train"))
"""Words of capitals before a name that are none of its words (`INFO loss`). Others may be the kind
of the value (`MSE Loss`) or which of several it is (`KL Loss: 0.1, CE Loss: 2.3`)."""
_EVALUATION = re.compile(
    r"(?<![\w/-])(?:val|valid|validation|eval|evaluation|test|dev)(?![\w/-])", re.IGNORECASE
)
_PLACE = re.compile(
    r"(?<!train )\b(?!train epoch: *\d+ *\[ *\d+/\d+ *\( *\d)"
    r"(?:(?:train(?:ing)?\s+)?epoch|train)\b(?:\(train\))?[:\s]*+\[?\s*+(?P<epoch>\d+)(?!\d)"
    r"(?:/\d+(?!\d))?\s*+\]?[\s,:|-]*+(?:\d+%\|[^|]*\|\s*+)?"
    r"(?:\[?(?:iter|iteration|step|batch)\b[:\s]*+)?[\[(]?\s*+(?P<step>\d+)\s*+/\s*(?P<total>\d+)",
    re.IGNORECASE,
)
"""Epoch, iteration and iterations in it: `Epoch: [0]  [ 20/1251]`, `Epoch 0:  4%|▍| 20/512 [`.
`Train Epoch: 1 [640/60000 (1%)]`, as PyTorch's examples write it, counts samples."""
_EPOCH_ALONE = re.compile(r"\bepoch\b[\s:=#]*+\[?\s*+(?P<epoch>\d+)(?!\d|\.\d)", re.IGNORECASE)
_KERAS = re.compile(r"^\s*(?P<step>\d+)/(?P<total>\d+) +(?:\[[=>.]|━|- |\d+m?s\b)")
"""The bar of Keras, in the epoch of the heading above it."""
_FRACTION = re.compile(
    r"(?:(?<!\d)\d+%\|[^|]*\||\b(?:iter|iteration|step)(?:\(train\))?[:\s]*\[|^\[(?:batch=)?)"
    r"\s*(?P<step>\d+)\s*/\s*\d+",
    re.IGNORECASE,
)
"""The step of a progress bar, as mmengine and Composer write it, or at the beginning of a line."""
_PAIR_OF_COUNTS = re.compile(r"^\[(?P<epoch>\d+), +(?P<step>\d+)\]")
"""Epoch and batch, as in PyTorch's first tutorial: `[1,  2000] loss: 2.205`."""
_RANK = re.compile(r"^\s*\[(?:rank|default)?(\d+)\]:|\((\d+)/\d+\) Epoch ")
"""Rank as torchrun and icefall write it."""
_LINES_LOOKED_AT = 5_000
_MARKS_MIN = 3
"""Lines of steps that make a text a log, where it was not named."""
_TEXT_SUFFIXES = ("", ".log", ".txt", ".out", ".err", NOTEBOOK)


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
    evaluation = _EVALUATION.search(text)
    if evaluation and _EVALUATION.search(_PAIR_OR_SHARE.sub(" ", text)):
        # The line is of an evaluation, not only a value of it.
        return {}
    found: dict[str, str] = {}
    loose: dict[str, str] = {}
    kinds: dict[str, list[str]] = {}
    for pair in _PAIR.finditer(text):
        words, value = pair[1].split(), pair[2]
        for begin in range(len(words)):
            rest = " ".join(words[begin:])
            before = words[begin - 1] if begin else ""
            a_kind = before.isupper() and before.lower() not in _LEVELS
            if before and before.lower() not in _SAME_VALUE | _LEVELS and not a_kind:
                break
            if " " in rest and words[begin].lower() in _SAME_VALUE and rest not in chosen:
                continue
            known = rest if rest in chosen else plain(rest)
            if before and known in _COMMON_WORDS and rest not in chosen:
                break
            if known in _NAMES or rest in chosen:
                if evaluation and evaluation.start() < pair.end() and _could_be_evaluated(known):
                    # Behind a value of an evaluation, only those that say so are of training.
                    break
                if a_kind:
                    kinds.setdefault(known, []).append(value)
                else:
                    (loose if before else found).setdefault(known, value)
                break
    found = loose | found
    if not any(name in _NUMBER_NAMES for name in found):
        found |= {name: values[0] for name, values in kinds.items() if len(values) == 1}
    return found


def _could_be_evaluated(name: str) -> bool:
    return name in _NUMBER_NAMES and not name.startswith(_TRAINING_PREFIXES)


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
    if _stepped(row):
        return row
    for place in (_PLACE, _FRACTION, _PAIR_OF_COUNTS, _KERAS):
        if found := place.search(line):
            groups = found.groupdict()
            return row | {STEP: int(groups["step"]), **_epoch(groups)}
    if EPOCH not in row and (found := _EPOCH_ALONE.search(line)):
        row |= _epoch(found.groupdict())
    return row or None


def _judged(row: Mapping[str, Any] | None, chosen: Collection[str]) -> bool:
    return row is not None and any(name in _NUMBER_NAMES or name in chosen for name in row)


def _stepped(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in QUANTITIES[STEP])


def _rows(
    lines: Iterable[_Line], row_of: _RowOf, chosen: Collection[str], left_out: set[str]
) -> Iterator[Row]:
    """Yield a row per line that holds a number to judge, of the rank that prints first.

    A line with an epoch alone is the heading of the lines below it. Other ranks are added to
    left_out.
    """
    first = ""
    heading: dict[str, Any] = {}
    for number, line in lines:
        row = row_of(chosen, line)
        if row is None:
            continue
        if not _judged(row, chosen):
            heading = {EPOCH: row[EPOCH]} if row.keys() == {EPOCH} else heading
            continue
        row = heading | row
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


_CELL = re.compile(rf"{NUMBER}%?")
_SEPARATOR = re.compile(r"^[\s|+:=-]+$")
_NAME_OF_COLUMN = re.compile(r"[A-Za-z_][\w ./()%-]{0,60}")


def _joined(lines: Iterable[_Line]) -> Iterator[_Line]:
    """Yield lines; a table of names and values, or a heading with indented values, as one.

    Of a table with a heading, each row becomes a line of names and values.
    """
    held: list[str] = []
    begin, tabular = 0, False
    columns: Sequence[str] = ()
    for number, line in lines:
        row = _cells_of_row(line)
        if columns and (len(row) == len(columns) or _SEPARATOR.match(line)):
            if not _SEPARATOR.match(line):
                cells = zip(columns, row, strict=True)
                yield number, ", ".join(f"{a}: {b}" for a, b in cells if _CELL.fullmatch(b))
            continue
        pair = _CELLS.match(line)
        if held and ((tabular and pair) or (not tabular and line[:1] in (" ", "\t"))):
            held.append(f"{pair[1]}: {pair[2]}" if pair else line.strip())
            continue
        if held:
            yield begin, ", ".join(held)
            held = []
        columns = row if _names_columns(row) else ()
        if columns:
            continue
        if pair or _HEADING.search(line):
            begin, tabular = number, pair is not None
            held = [f"{pair[1]}: {pair[2]}" if pair else line]
        else:
            yield number, line
    if held:
        yield begin, ", ".join(held)


def _cells_of_row(line: str) -> Sequence[str]:
    """Return the cells of a row of a table, between bars, tabulators or several spaces."""
    bare = line.strip()
    if bare[:1] == "|" and bare[-1:] == "|":
        return [cell.strip() for cell in bare[1:-1].split("|")]
    return [cell.strip() for cell in re.split(r"\t| {2,}+", line if "\t" in bare else bare)]


def _names_columns(cells: Sequence[str]) -> bool:
    names = {plain(cell) for cell in cells if _NAME_OF_COLUMN.fullmatch(cell)}
    places = names & {EPOCH, *QUANTITIES[STEP]}
    return bool(places) and len(names) == len(cells) and bool(names - places)


def _read(name: str, row_of: _RowOf, path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    chosen = frozenset(options.columns.values())
    ranks: set[str] = set()
    rows = bounded_rows(_rows(_joined(lines_of(path)), row_of, chosen, ranks))
    # Besides rows with a step there are such as the averages of an epoch after its steps, or, of
    # steps that only show their epoch, the last state of a bar.
    stepped = [(line, row) for line, row in rows if _stepped(row)]
    of_epochs = [(line, row) for line, row in rows if EPOCH in row and not _stepped(row)]
    placed = max(stepped, of_epochs, key=len)
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
        if row is not None and _judged(row, ()):
            seen += _stepped(row) or EPOCH in row
        if seen == _MARKS_MIN:
            return True
    return False


def _format(name: str, row_of: _RowOf) -> LogFormat:
    return LogFormat(name, partial(_recognises, row_of), partial(_read, name, row_of))


CONSOLES = tuple(_format(one.name, partial(_row_of_trainer, one)) for one in _TRAINERS)
ANY_CONSOLE = _format("console", _row_of_any)
