"""JSON lines: one object per line, as most loggers can write them; W&B and Neptune exports too."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, bounded_rows, log_of_rows
from mp_agent.errors import LogError, SourceError
from mp_agent.inputs.files import read_text
from mp_agent.inputs.texts import bounded_values, parse_json

_NAME = "jsonl"
_SUFFIXES = (".jsonl", ".ndjson")


def _recognises(path: Path, head: bytes) -> bool:
    if path.suffix in _SUFFIXES:
        return True
    first, _, rest = head.lstrip().partition(b"\n")
    is_object = first[:1] == b"{" and first.strip()[-1:] == b"}"
    # A `.json` file with a single object is a table.
    return is_object and (path.suffix != ".json" or rest.lstrip()[:1] == b"{")


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    problems = Problems()
    rows = bounded_rows(_rows(bounded_values(read_text(path), ",[{"), problems))
    if not rows:
        raise LogError("; ".join(problems.messages()) or "is empty")
    return [log_of_rows(path, _NAME, rows, options, problems=problems)]


def _rows(text: str, problems: Problems) -> Iterator[Row]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            entry = parse_json(content)
        except SourceError as error:
            problems.add(line, str(error).partition(": ")[2] or str(error))
            continue
        if isinstance(entry, Mapping):
            yield line, entry
        else:
            problems.add(line, f"is {type(entry).__name__}, not an object")


JSON_LINES = LogFormat(_NAME, _recognises, _read)
