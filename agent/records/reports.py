"""Reports: rows of one node, their bytes, and what makes a report invalid.

The report of a node agent to the root agent: its ranks' rows, reduced to those of one node.
A report is self-contained: it names its columns, shares and layers, so that the root needs no
earlier one to decode it. NaN stands for a value that no rank of the node observed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from operator import ge
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mp_agent.errors import ReportError
from mp_agent.records.columns import FAMILIES
from mp_agent.records.flight import FlightRequest
from mp_agent.records.schema import FamilyColumns, Text
from mp_agent.records.steps import EndReason, Phase

STEPS_PER_REPORT = 256
TABLES_PER_REPORT = 4
CONDITIONS_BYTES_MAX = 1 << 15

_RANKS_MAX = 2**20
_NAMES_MAX = 2**20

Rank = Annotated[int, Meta(ge=0, lt=_RANKS_MAX)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=_RANKS_MAX)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Sequence_ = Annotated[int, Meta(ge=0, lt=2**53)]
Digest = Annotated[int, Meta(ge=0, lt=2**32)]


class NodeShare(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A `schema.Share` without the place of the single rank in it."""

    group: Text
    optimizer: Text
    home: Text
    shard_count: Annotated[int, Meta(ge=1, lt=_RANKS_MAX)]
    replica_count: Annotated[int, Meta(ge=1, lt=_RANKS_MAX)]
    assumed: bool
    joint: bool = False
    family: Text = ""


class NodeRow(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A family's columns of what a node holds of one share: shards united, equal replicas once.

    Of an assumed share: the row that each of `ranks` has by itself; shards and replicas are (0,).
    """

    family: Index
    """Index into `NodeReport.families`."""
    share: Index
    """Index into `NodeReport.shares`."""
    shards: Ranks
    """Shard indices that the sums cover, ascending."""
    replicas: Ranks
    """Replica indices that have exactly this row, ascending."""
    ranks: Ranks
    """The ranks whose rows these are: one per replica and shard, replica after replica; ascending
    for an assumed share."""
    columns: tuple[float, ...]
    """Values in the order of the family's columns."""
    digests: tuple[Digest, ...] = ()
    """Digests of the row of each shard, before summing; none without replicas to compare."""


class StepValue(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One step column, merged over the ranks of a node by its algebra."""

    count: Annotated[int, Meta(ge=0, lt=_RANKS_MAX)]
    """Ranks that observed it; the weight of a MEAN."""
    value: float
    """NaN where `count` is 0."""


class WeightSample(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Digest of a few weights of ranks that hold the same shards of the same tensors."""

    of: Text
    """Names the (group, shard index) pairs; digests are compared among ranks of equal ones."""
    digest: float
    ranks: Ranks


class BatchSample(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Digest of a few elements of a step's first batch, and the ranks that had it."""

    of: Text
    """Names the ranks that are to have data of their own; empty where that is unknown."""
    digest: float
    ranks: Ranks


class OwnNonfinite(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Where gradients were first not finite, as the ranks saw before they were reduced."""

    backward: Annotated[int, Meta(ge=1)]
    """Its number within the step."""
    ranks: Ranks
    """Whose own gradients were not finite after that backward."""


class NodeStep(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One step, reduced over the ranks of a node that delivered it."""

    sequence: Sequence_
    step: Annotated[int, Meta(ge=-(2**53), lt=2**53)]
    """The trainer's own step if a rank of the node observed it, else `sequence`."""
    time_unix_seconds: float
    """Time by the node's own clock."""
    ranks: Ranks
    """Ranks that delivered the step, ascending."""
    holding: Index
    """Into `NodeReport.holdings`: the shares that the node's ranks held at this step."""
    values: tuple[StepValue, ...]
    """Values in the order of `NodeReport.step_columns`."""
    rows: tuple[NodeRow, ...]
    compute_seconds: tuple[float, ...]
    """Seconds in the order of `ranks`; NaN where they were not observed."""
    nonfinite_loss_ranks: Ranks = ()
    nonfinite_gradients: OwnNonfinite | None = None
    samples: tuple[WeightSample, ...] = ()
    batches: tuple[BatchSample, ...] = ()
    losses: tuple[float, ...] = ()
    """In the order of `ranks`, NaN where one has none; empty if none has."""
    batch_rows: tuple[float, ...] = ()
    """Likewise."""


class Layout(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Layers of one share, in module order."""

    digest: bytes
    """Digest of the other fields; equal digests mean equal layouts."""
    names: Annotated[tuple[Text, ...], Meta(max_length=_NAMES_MAX)]
    positions: Annotated[tuple[Index, ...], Meta(max_length=_NAMES_MAX)]
    """Place of each among all layers of its ranks."""


class LayerBlock(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The layers of one share on a node: as `NodeRow`, with one row per layer."""

    family: Index
    share: Index
    layout: Index
    """Index into `NodeReport.layouts`."""
    shards: Ranks
    replicas: Ranks
    ranks: Ranks
    values: bytes
    """Little-endian float64, column after column, each with one value per layer."""


class NodeLayers(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The layers of one sampled step, reduced over the ranks of a node."""

    sequence: Sequence_
    blocks: tuple[LayerBlock, ...]


class RankStatus(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """State of one rank of a node."""

    rank: Rank
    phase: Phase
    phase_name: Text
    started_sequence: Sequence_
    committed_sequence: Sequence_
    end: EndReason


class NodeReport(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What is new on a node since its last report.

    Steps ascend and follow each other without a gap: those after `after`, as far as there is a
    row of them. The root refuses a report that would leave a gap which could still be filled.
    """

    run: Text
    session: Text
    """Identifies this attempt on this node; each attempt has its own."""
    attempt: Index
    world_size: Annotated[int, Meta(ge=1, le=_RANKS_MAX)]
    node_rank: Rank
    host: Text
    url: Text
    """Base URL of the node agent, as others reach it; empty when it serves nothing."""
    sent_unix_seconds: float
    """Time by the node's own clock."""
    expected_ranks: Ranks
    """All ranks of this node, including those that have no ring yet."""
    known_ranks: Ranks
    """Those whose shares are known."""
    statuses: Annotated[tuple[RankStatus, ...], Meta(max_length=_RANKS_MAX)]
    probe_errors: Index
    records_dropped: Index
    final: bool = False
    """All ranks have ended, and this report has the last of their rows."""

    step_columns: tuple[Text, ...] = ()
    families: tuple[FamilyColumns, ...] = ()
    shares: Annotated[tuple[NodeShare, ...], Meta(max_length=_NAMES_MAX)] = ()
    held: tuple[Index, ...] = ()
    """The shares that the ranks hold now."""
    holdings: Annotated[tuple[tuple[Index, ...], ...], Meta(max_length=_NAMES_MAX)] = ()
    """The sets of shares that they held at the steps of this report."""
    layouts: tuple[Layout, ...] = ()

    after: Sequence_ = 0
    """Steps up to this one were in earlier reports, or are not available."""
    oldest: Sequence_ = 0
    """Steps up to this one are no longer available."""
    position: Sequence_ = 0
    """Later reports contain nothing up to this step."""
    steps: Annotated[tuple[NodeStep, ...], Meta(max_length=STEPS_PER_REPORT)] = ()

    layers_after: Sequence_ = 0
    layers_oldest: Sequence_ = 0
    layers_position: Sequence_ = 0
    layers: Annotated[tuple[NodeLayers, ...], Meta(max_length=TABLES_PER_REPORT)] = ()
    """The same for layer tables."""


class Receipt(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The root's answer to a report."""

    session: Text
    """Session of the report."""
    accepted: bool
    """False: the rows were refused; those after `position` must be sent again."""
    position: Sequence_
    """Steps up to this one need not be sent (again)."""
    layers_position: Sequence_
    settled: Sequence_
    """Steps up to this one will not be requested again: they are in the root's ledger."""
    layers_settled: Sequence_
    flight: FlightRequest | None = None
    """The last flight record that the root requests of all nodes."""
    conditions: Annotated[bytes, Meta(max_length=CONDITIONS_BYTES_MAX)] = b""
    """The run's recent conditions, for the ranks of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """A node of the run, as known to its root."""

    node_rank: int
    host: str
    url: str
    ranks: tuple[int, ...]
    active: bool
    """Whether a rank of it was running at its last report."""
    silent_seconds: float
    """Time since that report; 0 for the root's own node."""


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
    nonfinite = step.nonfinite_gradients
    evidence: tuple[Ranks, ...] = (step.nonfinite_loss_ranks,)
    evidence += () if nonfinite is None else (nonfinite.ranks,)
    evidence += (*(own.ranks for own in step.samples), *(own.ranks for own in step.batches))
    for ranks in evidence:
        if not present.issuperset(ranks):
            raise ReportError(f"{what} names ranks that did not deliver it")
    for digest in (*(own.digest for own in step.samples), *(own.digest for own in step.batches)):
        _finite(digest, f"sample of {what}")
    for values in (step.losses, step.batch_rows):
        if values and len(values) != len(step.ranks):
            raise ReportError(f"{what} has {len(step.ranks)} ranks, {len(values)} values")
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


FORMAT = 7
"""Incremented with every change that an agent of another version would misread."""

REPORT_BYTES_MAX = 64 * 2**20

_REPORTS = msgspec.msgpack.Decoder(tuple[int, NodeReport])
_RECEIPTS = msgspec.msgpack.Decoder(tuple[int, Receipt])
_FORMATS = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


def encode_report(report: NodeReport) -> bytes:
    """Return a report as bytes."""
    return _ENCODER.encode((FORMAT, report))


def decode_report(data: bytes) -> NodeReport:
    """Decode and check a report. Raises ReportError, which says what is wrong."""
    if len(data) > REPORT_BYTES_MAX:
        raise ReportError(f"a report of {len(data)} bytes; the limit is {REPORT_BYTES_MAX}")
    report: NodeReport = _decode(_REPORTS, data, "report")
    check_report(report)
    return report


def encode_receipt(receipt: Receipt) -> bytes:
    """Return a receipt as bytes."""
    return _ENCODER.encode((FORMAT, receipt))


def decode_receipt(data: bytes) -> Receipt:
    """Decode a receipt. Raises ReportError, which says what is wrong."""
    receipt: Receipt = _decode(_RECEIPTS, data, "receipt")
    return receipt


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes, what: str) -> Any:
    try:
        found, _ = _FORMATS.decode(data)
        if found != FORMAT:
            raise ReportError(f"{what} of format {found}; this agent reads format {FORMAT}")
        return decoder.decode(data)[1]
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError) as error:
        raise ReportError(f"not a {what}: {error}") from error
