"""Flight records: the steps and layers as the node agent merged them."""

from collections.abc import Sequence
from pathlib import Path

from mp_agent.backtest.log.training_log import Point, Quantity, ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat
from mp_agent.errors import FlightError, LogError
from mp_agent.flight.record.load import load
from mp_agent.node.flight.replay import merged_items
from mp_agent.records.merged import MergedStep

_NAME = "flight"
_PATTERNS = ("node*.npz", "*/node*.npz")


def _recognises(path: Path, head: bytes) -> bool:
    if path.is_file():
        return path.suffix == ".npz" and path.name.startswith("node")
    return any(True for pattern in _PATTERNS for _ in path.glob(pattern))


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    try:
        evidence = load(path)
    except FlightError as error:
        raise LogError(str(error).removeprefix(f"{path}: ")) from error
    items = tuple(merged_items(evidence.ranks))
    steps = [item for item in items if isinstance(item, MergedStep)]
    if not steps:
        raise LogError("the record holds no step")
    held = {Quantity.RANKS, Quantity.REPLICAS, Quantity.SKIPS, Quantity.CLIPPING, Quantity.SMALLEST}
    if len(items) > len(steps):
        held.add(Quantity.LAYERS)
    kept = f"a flight record holds the last {len(steps)} steps: older ones are not judged"
    return [
        TrainingLog(
            name=evidence.identity.run,
            source=str(path),
            format=_NAME,
            points=tuple(map(_point, steps)),
            merged=items,
            quantities=frozenset(held),
            notes=(*evidence.notes, kept),
        )
    ]


def _point(step: MergedStep) -> Point:
    loss = float("nan") if step.flag("loss_nonfinite") else step.get("loss")
    nonfinite = step.gradient_nonfinite_elements > 0
    return Point(
        step=step.step,
        time_seconds=step.time_unix_seconds,
        step_seconds=step.get("step_seconds"),
        loss=loss,
        grad_norm=float("nan") if nonfinite else step.grad_norm,
        learning_rate=step.get("learning_rate"),
        loss_scale=step.loss_scale,
        skipped=step.skipped,
    )


FLIGHT = LogFormat(_NAME, _recognises, _read)
