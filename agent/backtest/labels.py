"""What the user says of runs: which are healthy, and which went wrong."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mp_agent.backtest.results import RunResult
from mp_agent.errors import LogError, SourceError
from mp_agent.inputs.files import read_text
from mp_agent.inputs.texts import parse_yaml_texts

HEALTHY, WRONG, UNCLEAR = "healthy", "wrong", "unclear"
LABELS = (HEALTHY, WRONG, UNCLEAR)
_BYTES_MAX = 4 << 20
_CHARACTERS_SHOWN = 60


def read_labels(path: Path) -> dict[str, str]:
    """Return run or path → label, of a YAML or JSON mapping, or of CSV lines `run,label`.

    Raises LogError, naming the file and the line or run.
    """
    try:
        text = read_text(path, _BYTES_MAX)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror or error}") from error
    labels = _of_csv(path, text) if path.suffix == ".csv" else _of_mapping(path, text)
    for run, label in labels.items():
        if label not in LABELS:
            shown = f"run {run[:_CHARACTERS_SHOWN]!r} has label {label[:_CHARACTERS_SHOWN]!r}"
            raise LogError(f"{path}: {shown}; it must be one of {', '.join(LABELS)}")
    if not labels:
        raise LogError(f"{path}: holds no label")
    return labels


def label_of(labels: Mapping[str, str], run: RunResult) -> str:
    """Return the label of a run: by its name, its path, or the name of its file; "" without one."""
    source = Path(run.source)
    keys = (run.name, run.source, source.name, source.stem, source.parent.name)
    return next((labels[key] for key in keys if key in labels), "")


def _of_csv(path: Path, text: str) -> dict[str, str]:
    labels = {}
    lines = csv.reader(text.replace("\0", "").splitlines())
    for number, row in enumerate(_rows(path, lines), start=1):
        if not row or (number == 1 and row[-1].strip() == "label"):
            continue
        if len(row) != 2:
            raise LogError(f"{path}: line {number} holds {len(row)} values; write run,label")
        labels[row[0].strip()] = row[1].strip()
    return labels


def _rows(path: Path, lines: Iterable[list[str]]) -> Iterator[list[str]]:
    try:
        yield from lines
    except csv.Error as error:
        raise LogError(f"{path}: is no CSV: {error}") from error


def _of_mapping(path: Path, text: str) -> dict[str, str]:
    try:
        content = parse_yaml_texts(text)
    except SourceError as error:
        raise LogError(f"{path}: {error}") from error
    if not isinstance(content, Mapping):
        raise LogError(f"{path}: must hold a mapping from runs to labels")
    for run, label in content.items():
        if not isinstance(run, str) or not isinstance(label, str):
            raise LogError(
                f"{path}: run {str(run)[:_CHARACTERS_SHOWN]!r} has no label, but a list or table"
            )
    return dict(content)
