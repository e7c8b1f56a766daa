"""Plays the logged series of real runs through the account and the detectors of the node agent.

A logged point is taken as a step. A norm that is not finite is that of a step which the trainer
left out, since finite losses follow most of them; where no norm was logged it is taken as steady.
"""

import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from unittest.mock import patch

from mp_agent.node.conditions import tracker
from tests.agent.node.training import Training

DATA = Path(__file__).parent / "series.json.gz"
_SECONDS = 4.0
_SEVERITIES = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """The series of one run, a value per logged point; None where nothing was logged."""

    name: str
    kind: str
    label: str
    seconds: float
    """Between two points."""
    loss: Sequence[float | None]
    norm: Sequence[float | None] | None
    rate: Sequence[float | None] | None
    scale: Sequence[float | None] | None
    skipped: Sequence[float | None] | None
    """Cumulative."""

    def points(self) -> Iterator[dict[str, float]]:
        """Yield the merged columns of each point."""
        before = 0.0
        for index, loss in enumerate(self.loss):
            point = {"step_seconds": self.seconds, "skipped": 0.0, "elements": 1000.0}
            if loss is not None and isfinite(loss):
                point["loss"] = loss
            elif loss is not None:
                point["loss_nonfinite"] = 1.0
            norm = 1.0 if self.norm is None else self.norm[index]
            norm = 1.0 if norm is None else norm
            if isfinite(norm):
                point |= {"norm": norm, "abs_max": norm / 10, "nan_elements": 0.0}
            else:
                left_out = float("loss_nonfinite" not in point)
                point |= {"norm": 1.0, "nan_elements": 5.0, "skipped": left_out}
            if self.rate is not None and (rate := self.rate[index]) is not None:
                point["learning_rate"] = rate
            if self.scale is not None and (scale := self.scale[index]) is not None:
                point["loss_scale"] = scale
            if self.skipped is not None and (skipped := self.skipped[index]) is not None:
                point["skipped"] = float(skipped > before)
                before = skipped
            yield point


def load(path: Path = DATA) -> list[RealRun]:
    """Return the committed runs."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [RealRun(**run) for run in json.load(file)]


def play(run: RealRun) -> dict[str, str]:
    """Return every condition that the run brought, with its worst severity."""
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(tracker, "PROCESSOR_SHARE", 1e-9),  # one judgement per point
    ):
        training = Training(Path(directory))
        for point in run.points():
            training.wait(run.seconds)
            training.step(**point)
        training.wait(run.seconds)
    worst: dict[str, str] = {}
    for (name, severity), count in training.tracker.fired.items():
        if count and _SEVERITIES.index(severity) <= _SEVERITIES.index(worst.get(name, "info")):
            worst[name] = severity
    return worst


def table(found: Sequence[tuple[RealRun, dict[str, str]]]) -> str:
    """Return a Markdown table: run, kind, label, what it brought."""
    rows = ["| run | kind | label | points | alerts |", "| --- | --- | --- | --- | --- |"]
    for run, worst in found:
        alerts = ", ".join(f"{name} ({severity})" for name, severity in sorted(worst.items()))
        rows.append(
            f"| {run.name} | {run.kind} | {run.label} | {len(run.loss)} | {alerts or 'none'} |"
        )
    return "\n".join(rows)
