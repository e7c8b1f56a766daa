"""Megatron-LM and Megatron-DeepSpeed: one line per logging interval."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mp_agent.backtest.log.rows import Problems, Row
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, bounded_rows, log_of_rows
from mp_agent.backtest.readers.text.lines import NUMBER, lines_of, stamp
from mp_agent.errors import LogError

_NAME = "megatron"
_LINE = re.compile(r"iteration\s+(\d+)\s*/\s*\d+\s*\|")
_FIELD = re.compile(rf"\|\s*([a-zA-Z][\w ()-]*?):\s*({NUMBER})\s*(?=\||$)")
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


def _recognises(path: Path, head: bytes) -> bool:
    return (
        re.search(rb"iteration\s+\d+\s*/\s*\d+\s*\|.*elapsed time per iteration", head) is not None
    )


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    rows = bounded_rows(_rows(path))
    if not rows:
        raise LogError("holds no line `iteration N/ TOTAL | …`")
    return [log_of_rows(path, _NAME, rows, options, problems=Problems())]


def _rows(path: Path) -> Iterator[Row]:
    for number, line in lines_of(path):
        found = _LINE.search(line)
        if found is None:
            continue
        fields: dict[str, float] = {}
        for name, value in _FIELD.findall(line[found.end() - 1 :]):
            fields[_RENAMED.get(name.strip(), name.strip())] = float(value)
        if _SKIPPED in fields:
            fields["skipped_since_last"] = fields.pop(_SKIPPED)
        if _MILLISECONDS in fields:
            fields["step_seconds"] = fields.pop(_MILLISECONDS) / 1000
        time_seconds = stamp(line)
        if time_seconds is not None:
            fields["timestamp"] = time_seconds
        yield number, {"step": int(found[1]), **fields}


MEGATRON = LogFormat(_NAME, _recognises, _read)
