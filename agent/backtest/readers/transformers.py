"""Hugging Face Transformers: `trainer_state.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.columns import number
from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, log_of_rows
from mp_agent.errors import LogError
from mp_agent.inputs.files import read_text
from mp_agent.inputs.texts import parse_json

_NAME = "transformers"
_SUMMARY = "train_runtime"


def _recognises(path: Path, head: bytes) -> bool:
    return path.name == "trainer_state.json" or (
        path.suffix == ".json" and b'"log_history"' in head and head.lstrip()[:1] == b"{"
    )


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    state = parse_json(read_text(path))
    history = state.get("log_history") if isinstance(state, Mapping) else None
    if not isinstance(history, list) or not history:
        raise LogError("log_history is absent or empty")
    problems = Problems("log_history entry")
    rows: list[Row] = []
    step_seconds = None
    for index, entry in enumerate(history, start=1):
        if not isinstance(entry, Mapping):
            problems.add(index, f"is {type(entry).__name__}, not an object")
        elif _SUMMARY in entry:
            # The last entry of a training: means over all of it.
            step_seconds = _step_seconds(entry)
        else:
            rows.append((index, entry))
    return [log_of_rows(path, _NAME, rows, options, problems=problems, step_seconds=step_seconds)]


def _step_seconds(summary: Mapping[str, Any]) -> float | None:
    try:
        rate = number(summary.get("train_steps_per_second"))
        runtime, steps = number(summary.get(_SUMMARY)), number(summary.get("step"))
    except ValueError:
        return None
    if runtime and steps and runtime > 0 and steps > 0:
        return runtime / steps
    return 1 / rate if rate and rate > 0 else None


TRANSFORMERS = LogFormat(_NAME, _recognises, _read)
