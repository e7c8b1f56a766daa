"""Finds the logs at a path, and reads each in its format."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.console import ANY_CONSOLE, CONSOLES
from mp_agent.backtest.readers.flight import FLIGHT
from mp_agent.backtest.readers.format import HEAD_BYTES, LogFormat
from mp_agent.backtest.readers.mlflow import MLFLOW
from mp_agent.backtest.readers.prometheus import read_prometheus
from mp_agent.backtest.readers.tables import CSV_TABLE, JSON_LINES, JSON_TABLE, TRANSFORMERS
from mp_agent.backtest.readers.tensorboard import TENSORBOARD, WANDB
from mp_agent.backtest.readers.text import DEEPSPEED, FAIRSEQ, MEGATRON, TRANSFORMERS_CONSOLE
from mp_agent.errors import LogError, SourceError
from mp_agent.inputs.addresses import is_address, shown_address
from mp_agent.inputs.files import encoding_of, open_regular

FORMATS: tuple[LogFormat, ...] = (
    FLIGHT,
    TENSORBOARD,
    WANDB,
    MLFLOW,
    TRANSFORMERS,
    CSV_TABLE,
    JSON_LINES,
    JSON_TABLE,
    MEGATRON,
    FAIRSEQ,
    TRANSFORMERS_CONSOLE,
    DEEPSPEED,
    *CONSOLES,
    ANY_CONSOLE,
)
"""All formats, the most particular first."""

_FILES_MAX = 100_000


def format_names() -> tuple[str, ...]:
    """Return the names of all formats."""
    return tuple(log_format.name for log_format in FORMATS)


def read_logs(source: str, options: ReadOptions) -> Sequence[TrainingLog]:
    """Return the runs of one source. Raises LogError, naming the source and what is wrong.

    Of an address, neither the message nor the runs hold user, password and query.
    """
    shown = shown_address(source)
    try:
        if is_address(source):
            return read_prometheus(source, options, time.time())
        return _read_file(Path(source), options)
    except LogError as error:
        raise type(error)(f"{shown}: {error}") from None
    except SourceError as error:
        raise LogError(f"{shown}: {error}") from None
    except OSError as error:
        place = shown if error.filename in (None, source) else f"{shown}: {error.filename}"
        raise LogError(f"{place}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Source:
    """A path or an address. found: whether it was not named, but found below a directory."""

    address: str
    found: bool = False


def expand(named: Iterable[str]) -> Iterator[Source]:
    """Yield the logs at some paths: of a directory that is no log itself, all logs below it.

    Of several checkpoints of one run, only the newest is taken: it holds what the others hold.
    """
    for source in named:
        path = Path(source)
        if is_address(source) or not path.is_dir() or _recognised(path) is not None:
            yield Source(source)
            continue
        below = [Source(str(log), True) for log in _without_older_checkpoints(_below(path))]
        yield from below or [Source(source)]


def _read_file(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    if not path.exists():
        raise LogError("no such file or directory")
    found = next((one for one in FORMATS if one.name == options.format), None) or _recognised(path)
    if found is not None:
        return found.read(path, options)
    try:
        # What was named may be a console that begins with more than is looked at.
        return ANY_CONSOLE.read(path, options)
    except (LogError, OSError) as error:
        if isinstance(error, OSError) and not path.is_dir():
            raise
        known = ", ".join(format_names())
        raise LogError(
            f"is a log of no known format; known: {known}; see --format, or name a column of its "
            "lines by --column loss=NAME"
        ) from None


def _recognised(path: Path) -> LogFormat | None:
    head = _head(path) if path.is_file() else b""
    return next((one for one in FORMATS if one.recognises(path, head)), None)


def _head(path: Path) -> bytes:
    """Return the beginning of a file; of a text, in UTF-8."""
    with open_regular(path) as file:
        head = file.read(HEAD_BYTES)
    encoding = encoding_of(head)
    return head if encoding == "utf-8" else head.decode(encoding, "replace").encode()


def _below(directory: Path) -> Iterator[Path]:
    """Yield what is recognised below a directory, in order; nothing below what is a log itself.

    What only has the name of a log, but is no file, is yielded too: reading it says what is wrong.
    """
    seen = 0
    waiting = _entries(directory)
    while waiting:
        path = waiting.pop()
        seen += 1
        if seen > _FILES_MAX:
            raise LogError(f"{directory}: holds more than {_FILES_MAX} files")
        try:
            if _recognised(path) is not None:
                yield path
            elif path.is_dir() and not path.is_symlink():
                waiting += _entries(path)
        except (OSError, SourceError):  # the latter: a notebook that is none
            continue


def _entries(directory: Path) -> list[Path]:
    """Return what a directory holds, but for hidden entries, the last one first."""
    names = sorted(os.listdir(directory), reverse=True)
    return [directory / name for name in names if not name.startswith(".")]


def _without_older_checkpoints(paths: Iterable[Path]) -> list[Path]:
    newest: dict[Path, Path] = {}
    others = []
    for path in paths:
        run = path.parent.parent
        if path.name != "trainer_state.json" or not path.parent.name.startswith("checkpoint-"):
            others.append(path)
        elif run not in newest or _number(path) > _number(newest[run]):
            newest[run] = path
    whole = {path.parent for path in others if path.name == "trainer_state.json"}
    return sorted([*others, *(path for run, path in newest.items() if run not in whole)])


def _number(path: Path) -> int:
    digits = path.parent.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdigit() else -1


def renamed(logs: Sequence[TrainingLog]) -> list[TrainingLog]:
    """Return logs with names that differ: those that are equal get their place among them."""
    names: dict[str, int] = {}
    distinct = []
    for log in logs:
        names[log.name] = names.get(log.name, 0) + 1
        count = names[log.name]
        distinct.append(log if count == 1 else replace(log, name=f"{log.name} ({count})"))
    return distinct
