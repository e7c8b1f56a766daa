"""Flight records: the steps and layers as the node agent merged them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mp_agent.alerting.backtesting import Quantity
from mp_agent.backtest.log.training_log import Point, ReadOptions, TrainingLog
from mp_agent.backtest.readers.format import LogFormat
from mp_agent.errors import FlightError, LogError
from mp_agent.flight.record.evidence import load
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.flight.replay import merged_items
from mp_agent.records.columns import ACTIVATIONS, DISTRIBUTION, FP8, GRADIENTS, OPTIMIZER
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep

_NAME = "flight"
_PATTERNS = ("node*.npz", "*/node*.npz")
_OF_FAMILIES: Mapping[str, Quantity] = {
    GRADIENTS.name: Quantity.LAYERS,
    DISTRIBUTION.name: Quantity.DISTRIBUTION,
    OPTIMIZER.name: Quantity.OPTIMIZER,
    ACTIVATIONS.name: Quantity.ACTIVATIONS,
    FP8.name: Quantity.FP8,
}
"""What a record holds by the families whose layers it has."""


def _recognises(path: Path, head: bytes) -> bool:
    if path.is_file():
        return path.suffix == ".npz" and path.name.startswith("node")
    return any(True for pattern in _PATTERNS for _ in path.glob(pattern))


def _read(path: Path, options: ReadOptions) -> Sequence[TrainingLog]:
    try:
        evidence = load(path)
    except FlightError as error:
        raise LogError(str(error).removeprefix(f"{path}: ")) from error
    try:
        log = log_of_ranks(evidence.ranks, source=str(path))
    except LogError as error:
        raise LogError(f"the record {error}") from None
    kept = f"a flight record holds the last {len(log.points)} steps: older ones are not judged"
    return [replace(log, notes=(*evidence.notes, kept))]


def log_of_ranks(ranks: Sequence[RankLog], *, source: str) -> TrainingLog:
    """Return what the ranks of an attempt wrote, merged, as a log. LogError without a step."""
    items = tuple(merged_items(ranks))
    steps = [item for item in items if isinstance(item, MergedStep)]
    if not steps:
        raise LogError("holds no step")
    held = {
        Quantity.RANKS,
        Quantity.BATCHES,
        Quantity.REPLICAS,
        Quantity.SKIPS,
        Quantity.CLIPPING,
        Quantity.SMALLEST,
    }
    layered = {name for item in items if isinstance(item, MergedTable) for name in item.families}
    held |= {quantity for name, quantity in _OF_FAMILIES.items() if name in layered}
    return TrainingLog(
        name=ranks[0].identity.run,
        source=source,
        format=_NAME,
        points=tuple(map(_point, steps)),
        merged=items,
        quantities=frozenset(held),
    )


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
