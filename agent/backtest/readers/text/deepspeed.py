"""DeepSpeed's own lines: steps, learning rate, and overflows with the scale that was tried."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mp_agent.backtest.log.rows import Problems
from mp_agent.backtest.log.training_log import ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat, bounded_rows, log_of_rows
from mp_agent.backtest.readers.text.lines import NUMBER, lines_of, stamp
from mp_agent.errors import LogError

_NAME = "deepspeed"
_STEP = re.compile(rf"step=(\d+), skipped=(\d+), lr=\[({NUMBER})")
_LOSS = re.compile(rf"steps: (\d+) loss: ({NUMBER})(?: iter time \(s\): ({NUMBER}))?")
_OVERFLOW = re.compile(rf"OVERFLOW! Rank 0 Skipping step\. Attempted loss scale: ({NUMBER})")
_OVERFLOW_BEFORE = re.compile(rf"Reducing dynamic loss scale from ({NUMBER}) to")
_MARKS = re.compile(
    rb"step=\d+, skipped=\d+, lr=\[|OVERFLOW! Rank \d+ Skipping step|Reducing dynamic loss scale"
)


def _recognises(path: Path, head: bytes) -> bool:
    return _MARKS.search(head) is not None


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    rows = bounded_rows(_rows(path))
    if not rows:
        raise LogError("holds no line `step=N, skipped=N, lr=[…]` and no overflow")
    if any("skipped" in row for _, row in rows):
        # Each skip has a line of its own, with its scale.
        for _, row in rows:
            row.pop("skipped_cumulative", None)
    return [log_of_rows(path, _NAME, rows, options, problems=Problems())]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    step = 0
    for number, line in lines_of(path):
        if found := _STEP.search(line):
            step = int(found[1])
            row: dict[str, Any] = {
                "skipped_cumulative": float(found[2]),
                "learning_rate": float(found[3]),
            }
        elif found := _LOSS.search(line):
            step = int(found[1])
            row = {"loss": float(found[2])}
            if found[3]:
                row["step_seconds"] = float(found[3])
        elif found := _OVERFLOW.search(line) or _OVERFLOW_BEFORE.search(line):
            row = {"loss_scale": float(found[1]), "skipped": 1.0}
        else:
            continue
        time_seconds = stamp(line)
        yield number, {"step": step, **row, **({"timestamp": time_seconds} if time_seconds else {})}


DEEPSPEED = LogFormat(_NAME, _recognises, _read)
