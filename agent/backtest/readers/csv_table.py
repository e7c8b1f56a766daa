"""CSV and TSV with a heading: Lightning's CSVLogger, spreadsheets, exports of W&B charts."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, bounded_rows, log_of_rows, run_name
from mp_agent.errors import LogError
from mp_agent.inputs.files import read_text
from mp_agent.inputs.texts import bounded_values

_NAME = "csv"
_SUFFIXES = (".csv", ".tsv")
_FIELD_CHARACTERS_MAX = 1_000_000
_CHART_COLUMN = re.compile(r"^(?P<run>.+) - (?P<metric>[^-]+?)$")
_CHART_EXTREMES = ("__MIN", "__MAX")


def _recognises(path: Path, head: bytes) -> bool:
    return path.suffix in _SUFFIXES


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    text = read_text(path)
    problems = Problems()
    delimiter = "\t" if path.suffix == ".tsv" else ","
    rows = bounded_rows(_rows(bounded_values(text, delimiter + "\n"), delimiter, problems))
    if not rows:
        raise LogError("; ".join(problems.messages()) or "holds no row below its heading")
    logs, failed = [], []
    for name, own in _by_run(rows, run_name(path)).items():
        try:
            logs.append(log_of_rows(path, _NAME, own, options, name=name, problems=problems))
        except LogError as error:
            failed.append(error)
    if not logs:
        raise failed[0]
    return logs


def _rows(text: str, delimiter: str, problems: Problems) -> Iterator[Row]:
    csv.field_size_limit(_FIELD_CHARACTERS_MAX)
    lines = csv.reader(io.StringIO(text.replace("\0", "")), delimiter=delimiter)
    try:
        heading = [name.strip().strip("\ufeff") for name in next(lines, [])]
        if not any(heading):
            raise LogError("line 1: holds no column names")
        for cells in lines:
            if len(cells) > len(heading):
                problems.add(
                    lines.line_num, f"holds {len(cells)} values, the heading {len(heading)}"
                )
            elif cells:
                # A shorter line is one that was cut off: its last value may be too.
                whole = cells if len(cells) == len(heading) else cells[:-1]
                yield lines.line_num, dict(zip(heading, whole, strict=False))
    except csv.Error as error:
        problems.add(lines.line_num, str(error))


def _by_run(rows: Sequence[Row], name: str) -> Mapping[str, Sequence[Row]]:
    """Return rows by run: a chart exported by W&B has a column per run, `RUN - METRIC`."""
    names = list(dict.fromkeys(column for _, row in rows for column in row))
    found = [(column, _CHART_COLUMN.match(column)) for column in names]
    runs: dict[str, dict[str, str]] = {}
    for column, match in found:
        if match and not column.endswith(_CHART_EXTREMES):
            runs.setdefault(match["run"], {})[column] = match["metric"]
    if not runs:
        return {name: rows}
    common = [column for column, match in found if not match]
    return {
        run: [
            (
                line,
                {
                    **{column: row[column] for column in common if column in row},
                    **{own[column]: row[column] for column in own if column in row},
                },
            )
            for line, row in rows
        ]
        for run, own in runs.items()
    }


CSV_TABLE = LogFormat(_NAME, _recognises, _read)
