"""The report of a node agent to the root agent: its ranks' rows, reduced to those of one node.

A report is self-contained: it names its columns, shares and layers, so that the root needs no
earlier one to decode it. NaN stands for a value that no rank of the node observed.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from mp_agent.records.flight import FlightRequest
from mp_agent.records.schema import FamilyColumns, Text
from mp_agent.records.steps import (
    NAMES_MAX,
    RANKS_MAX,
    STEPS_PER_REPORT,
    Digest,
    EndReason,
    Index,
    Phase,
    Rank,
    Ranks,
    Sequence_,
    StepBlock,
    TrainerStep,
)

TABLES_PER_REPORT = 4
CONDITIONS_BYTES_MAX = 1 << 15

Indices = Annotated[tuple[Index, ...], Meta(max_length=NAMES_MAX)]


class NodeShare(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A `schema.Share` without the place of the single rank in it."""

    group: Text
    optimizer: Text
    home: Text
    shard_count: Annotated[int, Meta(ge=1, lt=RANKS_MAX)]
    replica_count: Annotated[int, Meta(ge=1, lt=RANKS_MAX)]
    assumed: bool
    joint: bool = False
    family: Text = ""


class NodeRow(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
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


class StepValue(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One step column, merged over the ranks of a node by its algebra."""

    count: Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
    """Ranks that observed it; the weight of a MEAN."""
    value: float
    """NaN where `count` is 0."""


class WeightSample(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
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


class OwnNonfinite(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Where gradients were first not finite, as the ranks saw before they were reduced."""

    backward: Annotated[int, Meta(ge=1)]
    """Its number within the step."""
    ranks: Ranks
    """Whose own gradients were not finite after that backward."""


class NodeStep(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """One step, reduced over the ranks of a node that delivered it."""

    sequence: Sequence_
    step: TrainerStep
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


class Layout(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """Layers of one share, in module order."""

    digest: bytes
    """`layout_digest` of the other fields; equal digests mean equal layouts."""
    names: Annotated[tuple[Text, ...], Meta(max_length=NAMES_MAX)]
    positions: Annotated[tuple[Index, ...], Meta(max_length=NAMES_MAX)]
    """Place of each among all layers of its ranks."""


class LayerBlock(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
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


class NodeLayers(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """The layers of one sampled step, reduced over the ranks of a node."""

    sequence: Sequence_
    blocks: tuple[LayerBlock, ...]


class RankStatus(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """State of one rank of a node."""

    rank: Rank
    phase: Phase
    phase_name: Text
    started_sequence: Sequence_
    committed_sequence: Sequence_
    end: EndReason


class NodeReport(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """What is new on a node since its last report.

    Steps ascend and follow each other without a gap: those after `after`, as far as there is a
    row of them. The root refuses a report that would leave a gap which could still be filled.
    """

    run: Text
    session: Text
    """Identifies this attempt on this node; each attempt has its own."""
    attempt: Index
    world_size: Annotated[int, Meta(ge=1, le=RANKS_MAX)]
    node_rank: Rank
    host: Text
    url: Text
    """Base URL of the node agent, as others reach it; empty when it serves nothing."""
    sent_unix_seconds: float
    """Time by the node's own clock."""
    expected_ranks: Ranks
    """All ranks of this node, including those that have no ring yet."""
    known_ranks: Ranks
    """Those whose shares are known, ascending."""
    statuses: Annotated[tuple[RankStatus, ...], Meta(max_length=RANKS_MAX)]
    """Of the ranks that have a ring, ascending. All rows are of those."""
    probe_errors: Index
    records_dropped: Index
    final: bool = False
    """All ranks have ended, and this report has the last of their rows."""

    step_columns: tuple[Text, ...] = ()
    families: tuple[FamilyColumns, ...] = ()
    shares: Annotated[tuple[NodeShare, ...], Meta(max_length=NAMES_MAX)] = ()
    held: Indices = ()
    """The shares that the ranks hold now, ascending."""
    holdings: Annotated[tuple[Indices, ...], Meta(max_length=NAMES_MAX)] = ()
    """The sets of shares that they held at the steps of this report, each ascending."""
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
    blocks: Annotated[tuple[StepBlock, ...], Meta(max_length=STEPS_PER_REPORT)] = ()
    """Further steps of the same range. No step is in two of them, or in `steps` as well."""

    @property
    def newest(self) -> int:
        """The last step of which there are rows; 0 without any."""
        ends = [block.sequences[-1] for block in self.blocks]
        return max([*ends, *(step.sequence for step in self.steps[-1:])], default=0)


class Receipt(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
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


def layout_digest(names: tuple[str, ...], positions: tuple[int, ...]) -> bytes:
    """Return the digest of a layout."""
    return hashlib.blake2b(repr((names, positions)).encode(), digest_size=16).digest()
