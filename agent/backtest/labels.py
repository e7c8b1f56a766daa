"""What the user says of runs: which are healthy, and which went wrong."""

import csv
from collections.abc import Mapping
from pathlib import Path

import yaml

from mp_agent.backtest.results import RunResult
from mp_agent.errors import LogError

HEALTHY, WRONG, UNCLEAR = "healthy", "wrong", "unclear"
LABELS = (HEALTHY, WRONG, UNCLEAR)


def read_labels(path: Path) -> dict[str, str]:
    """Return run or path → label, of a YAML or JSON mapping, or of CSV lines `run,label`.

    Raises LogError, naming the file and the line or run.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: cannot be read: {error}") from error
    labels = _of_csv(path, text) if path.suffix == ".csv" else _of_mapping(path, text)
    for run, label in labels.items():
        if label not in LABELS:
            raise LogError(
                f"{path}: run {run!r} has label {label!r}; it must be one of {', '.join(LABELS)}"
            )
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
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        if not row or (number == 1 and row[-1].strip() == "label"):
            continue
        if len(row) != 2:
            raise LogError(f"{path}: line {number} holds {len(row)} values; write run,label")
        labels[row[0].strip()] = row[1].strip()
    return labels


def _of_mapping(path: Path, text: str) -> dict[str, str]:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise LogError(f"{path}: is no YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise LogError(f"{path}: must hold a mapping from runs to labels")
    return {str(run): str(label) for run, label in content.items()}
