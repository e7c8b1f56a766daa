"""Consistency checks of a decoded report: indices, lengths and numbers."""

from collections.abc import Sequence
from math import inf, isnan
from operator import ge

from mp_agent.errors import ReportError
from mp_agent.records.columns import FAMILIES
from mp_agent.records.reports.rows import LayerBlock, NodeLayers, NodeReport, NodeRow, NodeStep


def check_report(report: NodeReport) -> None:
    """Raise ReportError unless a report's indices, lengths and numbers are consistent."""
    _ascending(report.expected_ranks, "expected_ranks")
    _ascending([status.rank for status in report.statuses], "ranks of statuses")
    _below(report.expected_ranks, report.world_size, "expected_ranks")
    _below([status.rank for status in report.statuses], report.world_size, "ranks of statuses")
    _below(report.known_ranks, report.world_size, "known_ranks")
    for holding in (report.held, *report.holdings):
        _below(holding, len(report.shares), "holdings")
    _finite(report.sent_unix_seconds, "sent_unix_seconds")
    _unique(report.step_columns, "step_columns")
    _unique([family.name for family in report.families], "families")
    for family in report.families:
        _unique(family.columns, f"columns of {family.name}")
    _ascending([step.sequence for step in report.steps], "sequences of steps")
    _ascending([table.sequence for table in report.layers], "sequences of layers")
    _within(report.steps, report.after, report.position, "steps")
    _within(report.layers, report.layers_after, report.layers_position, "layers")
    for layout in report.layouts:
        if len(layout.names) != len(layout.positions):
            raise ReportError("a layout has not as many positions as names")
    for step in report.steps:
        _check_step(report, step)
    for table in report.layers:
        for block in table.blocks:
            _check_block(report, block)


def _check_step(report: NodeReport, step: NodeStep) -> None:
    what = f"step {step.sequence}"
    _ascending(step.ranks, f"ranks of {what}")
    _below(step.ranks, report.world_size, f"ranks of {what}")
    _finite(step.time_unix_seconds, f"time of {what}")
    if not step.ranks or len(step.compute_seconds) != len(step.ranks):
        raise ReportError(f"{what} has {len(step.ranks)} ranks, {len(step.compute_seconds)} times")
    if len(step.values) != len(report.step_columns):
        raise ReportError(f"{what} has {len(step.values)} values, not {len(report.step_columns)}")
    _below((step.holding,), len(report.holdings), f"holding of {what}")
    present = set(step.ranks)
    for value in step.values:
        if bool(value.count) == isnan(value.value):
            raise ReportError(f"{what} has the value {value.value} of {value.count} observations")
    own = step.nonfinite_gradients
    evidence = (step.nonfinite_loss_ranks, () if own is None else own.ranks)
    for ranks in (*evidence, *(sample.ranks for sample in step.samples)):
        if not present.issuperset(ranks):
            raise ReportError(f"{what} names ranks that did not deliver it")
    for sample in step.samples:
        _finite(sample.digest, f"weight sample of {what}")
    for row in step.rows:
        _check_place(report, row, what)
        if not present.issuperset(row.ranks):
            raise ReportError(f"{what} has rows of ranks that did not deliver it")
        if len(row.columns) != len(report.families[row.family].columns):
            raise ReportError(f"{what} has a row of {len(row.columns)} columns")
        if row.digests and len(row.digests) != len(row.shards):
            raise ReportError(f"{what} has {len(row.digests)} digests of {len(row.shards)} shards")
        if any(value < 0.0 for value in row.columns) and _is_wrong(row, report):
            raise ReportError(f"{what} has a row with a negative value")


def _is_wrong(row: NodeRow, report: NodeReport) -> bool:
    """Return whether a negative value is in a column that has none."""
    sent = report.families[row.family]
    known = {own.name: own.columns for own in FAMILIES}.get(sent.name, ())
    unsigned = {column.name for column in known if not column.signed}
    pairs = zip(sent.columns, row.columns, strict=True)
    return any(value < 0.0 and name in unsigned for name, value in pairs)


def _check_block(report: NodeReport, block: LayerBlock) -> None:
    _check_place(report, block, "layer block")
    _below((block.layout,), len(report.layouts), "layout of a layer block")
    layers = len(report.layouts[block.layout].names)
    columns = len(report.families[block.family].columns)
    if len(block.values) != layers * columns * 8:
        raise ReportError(f"a layer block of {layers} layers has {len(block.values)} bytes")


def _check_place(report: NodeReport, row: NodeRow | LayerBlock, what: str) -> None:
    _below((row.family,), len(report.families), f"family of {what}")
    _below((row.share,), len(report.shares), f"share of {what}")
    share = report.shares[row.share]
    _below(row.ranks, report.world_size, f"ranks of {what}")
    for indices, limit, name in (
        (row.shards, share.shard_count, "shards"),
        (row.replicas, share.replica_count, "replicas"),
    ):
        _ascending(indices, f"{name} of {what}")
        _below(indices, limit, f"{name} of {what}")
    parts = len(row.shards) * len(row.replicas)
    if not row.ranks or not (share.assumed or parts == len(row.ranks)):
        raise ReportError(f"{what} has a row of {parts} parts and {len(row.ranks)} ranks")


def _unique(names: Sequence[str], what: str) -> None:
    if len(set(names)) != len(names):
        raise ReportError(f"{what} are not unique")


def _ascending(numbers: Sequence[int], what: str) -> None:
    if len(numbers) > 1 and any(map(ge, numbers, numbers[1:])):
        raise ReportError(f"{what} do not ascend")


def _below(numbers: Sequence[int], limit: int, what: str) -> None:
    if numbers and max(numbers) >= limit:
        raise ReportError(f"{what}: {max(numbers)} is not below {limit}")


def _within(
    items: Sequence[NodeStep] | Sequence[NodeLayers], after: int, position: int, what: str
) -> None:
    if after > position:
        raise ReportError(f"{what} after {after} cannot end at {position}")
    if items and not after < items[0].sequence <= items[-1].sequence <= position:
        raise ReportError(f"{what} are not those from {after} to {position}")


def _finite(number: float, what: str) -> None:
    if isnan(number) or number in (inf, -inf):
        raise ReportError(f"{what} is {number}")
