"""Reports and receipts as bytes, and what makes a report invalid."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf, isnan
from operator import ge
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from mp_agent.errors import ReportError, ReportTooLarge
from mp_agent.records.columns import FAMILIES
from mp_agent.records.node_report import (
    Indices,
    LayerBlock,
    Layout,
    NodeLayers,
    NodeReport,
    NodeRow,
    NodeShare,
    NodeStep,
    Receipt,
    layout_digest,
)
from mp_agent.records.schema import FamilyColumns
from mp_agent.records.steps import (
    Ranks,
    RowForm,
    StepBlock,
    StepForm,
)

ROWS_PER_REPORT = 2**19
"""Bound on the rows and samples of all steps, and on the blocks of layers: each takes time."""
LAYERS_PER_REPORT = 2**17
"""Bound on the layers of all layouts together. A rank may have a hundred thousand."""
SHARES_PER_REPORT = 2**16
HELD_PER_REPORT = 2**18
"""Bound on the shares of all holdings together, which the root keeps."""
COLUMNS_PER_REPORT = 2**12
"""Bound on step columns and those of families together, which the root keeps as well."""


class _Terms(Struct, frozen=True, array_like=True, gc=False):
    """What the rows of a report refer to: nearly all reports of a node have the same."""

    world_size: int
    ranks: Ranks
    """Of the node, by their statuses."""
    expected_ranks: Ranks
    known_ranks: Ranks
    step_columns: tuple[str, ...]
    families: tuple[FamilyColumns, ...]
    shares: tuple[NodeShare, ...]
    held: Indices
    holdings: tuple[Indices, ...]


_PASSED_MAX = 2**16
_passed: set[bytes] = set()
"""Digests of what was found consistent."""


class _Layouts:
    """Checks layouts; one that has passed is compared, which takes a tenth of a digest's time."""

    _NAME_BYTES = 128
    _BYTES_MAX = 2**25

    def __init__(self) -> None:
        self._passed: dict[bytes, Layout] = {}
        self._bytes = 0

    def check(self, layout: Layout) -> None:
        """Raise ReportError unless a layout is consistent."""
        if self._passed.get(layout.digest) == layout:
            return
        if len(layout.names) != len(layout.positions):
            raise ReportError("a layout has not as many positions as names")
        if layout.digest != layout_digest(layout.names, layout.positions):
            raise ReportError(f"a layout has digest {layout.digest.hex()}, which is not its own")
        self._bytes += sum(map(len, layout.names)) + self._NAME_BYTES * (1 + len(layout.names))
        if self._bytes > self._BYTES_MAX:
            self._passed.clear()
            self._bytes = 0
        else:
            self._passed[layout.digest] = layout


_layouts = _Layouts()


def _once(of: object, check: Callable[[], None]) -> bytes:
    """Check what most reports have alike unless its equal has passed; return its digest.

    Digests are kept rather than what they are of, so that no report fills memory.
    """
    digest = hashlib.blake2b(_ENCODER.encode(of), digest_size=16).digest()
    if digest not in _passed:
        check()
        if len(_passed) >= _PASSED_MAX:
            _passed.clear()
        _passed.add(digest)
    return digest


def check_report(report: NodeReport) -> None:
    """Raise ReportError unless a report's indices, lengths and numbers are consistent.

    Raises ReportTooLarge, before anything else, where it has more than a root accepts.
    """
    _check_size(report)
    terms = _Terms(
        report.world_size,
        tuple([status.rank for status in report.statuses]),
        report.expected_ranks,
        report.known_ranks,
        report.step_columns,
        report.families,
        report.shares,
        report.held,
        report.holdings,
    )
    known = _once(terms, partial(_check_terms, terms))
    _finite(report.sent_unix_seconds, "sent_unix_seconds")
    sequences = [step.sequence for step in report.steps]
    _ascending(sequences, "sequences of steps")
    _ascending([table.sequence for table in report.layers], "sequences of layers")
    _within(report.steps, report.after, report.position, "steps")
    _within(report.layers, report.layers_after, report.layers_position, "layers")
    for layout in report.layouts:
        _layouts.check(layout)
    for step in report.steps:
        _check_step(terms, known, step)
    for own in report.blocks:
        _check_steps(report, terms, known, own)
        sequences += own.sequences
    _unique(sequences, "sequences of steps and blocks")
    layers = tuple([len(layout.names) for layout in report.layouts])
    for table in report.layers:
        _check_table(terms, known, layers, table)


def _check_size(report: NodeReport) -> None:
    rows = sum(len(step.rows) + len(step.samples) + len(step.batches) for step in report.steps)
    rows += sum(len(own.form.rows) * len(own.sequences) for own in report.blocks)
    rows += sum(len(table.blocks) for table in report.layers) + len(report.layouts)
    for number, limit, what in (
        (rows, ROWS_PER_REPORT, "rows"),
        (sum(len(layout.names) for layout in report.layouts), LAYERS_PER_REPORT, "layers"),
        (len(report.shares), SHARES_PER_REPORT, "shares"),
        (len(report.held) + sum(map(len, report.holdings)), HELD_PER_REPORT, "shares in holdings"),
    ):
        if number > limit:
            raise ReportTooLarge(f"a report of {number} {what}; the limit is {limit}")


def _check_terms(terms: _Terms) -> None:
    columns = len(terms.step_columns) + sum(len(family.columns) for family in terms.families)
    if columns > COLUMNS_PER_REPORT:
        raise ReportTooLarge(f"a report of {columns} columns; the limit is {COLUMNS_PER_REPORT}")
    for ranks, what in (
        (terms.expected_ranks, "expected_ranks"),
        (terms.known_ranks, "known_ranks"),
        (terms.ranks, "ranks of statuses"),
    ):
        _ascending(ranks, what)
        _below(ranks, terms.world_size, what)
    _among(terms.known_ranks, terms.expected_ranks, "known_ranks")
    for holding in (terms.held, *terms.holdings):
        _ascending(holding, "shares of holdings")
        _below(holding, len(terms.shares), "shares of holdings")
    _unique(terms.step_columns, "step_columns")
    _unique([family.name for family in terms.families], "families")
    for family in terms.families:
        _unique(family.columns, f"columns of {family.name}")


def _check_step(terms: _Terms, known: bytes, step: NodeStep) -> None:
    what = f"step {step.sequence}"
    _finite(step.time_unix_seconds, f"time of {what}")
    if not step.ranks or len(step.compute_seconds) != len(step.ranks):
        raise ReportError(f"{what} has {len(step.ranks)} ranks, {len(step.compute_seconds)} times")
    if len(step.values) != len(terms.step_columns):
        raise ReportError(f"{what} has {len(step.values)} values, not {len(terms.step_columns)}")
    present, limit = set(step.ranks), len(step.ranks)
    for value in step.values:
        if bool(value.count) == isnan(value.value) or value.count > limit:
            raise ReportError(
                f"{what} has the value {value.value} of {value.count} observations on {limit} ranks"
            )
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
    places = tuple(
        (
            row.family,
            row.share,
            row.shards,
            row.replicas,
            row.ranks,
            len(row.columns),
            len(row.digests),
        )
        for row in step.rows
    )
    form = (known, step.ranks, step.holding, places)
    _once(form, partial(_check_rows_of_step, terms, step, what))
    for row in step.rows:
        if any(value < 0.0 for value in row.columns) and _is_wrong(row, terms):
            raise ReportError(f"{what} has a row with a negative value")


def _check_rows_of_step(terms: _Terms, step: NodeStep, what: str) -> None:
    _check_places(terms, step, what)
    for row in step.rows:
        if len(row.columns) != len(terms.families[row.family].columns):
            raise ReportError(f"{what} has a row of {len(row.columns)} columns")
        if row.digests and len(row.digests) != len(row.shards):
            raise ReportError(f"{what} has {len(row.digests)} digests of {len(row.shards)} shards")


def _is_wrong(row: NodeRow, terms: _Terms) -> bool:
    """Return whether a negative value is in a column that has none."""
    sent = terms.families[row.family]
    unsigned = _unsigned(sent.name)
    pairs = zip(sent.columns, row.columns, strict=True)
    return any(value < 0.0 and name in unsigned for name, value in pairs)


def _check_steps(report: NodeReport, terms: _Terms, known: bytes, block: StepBlock) -> None:
    form, count = block.form, len(block.sequences)
    what = f"block of step {block.sequences[0]}"
    _ascending(block.sequences, f"steps of {what}")
    if not report.after < block.sequences[0] <= block.sequences[-1] <= report.position:
        raise ReportError(f"{what} is not from {report.after} to {report.position}")
    if len(block.steps) != count or len(block.times_unix_seconds) != count:
        raise ReportError(f"{what} has not as many steps and times as numbers")
    for seconds in block.times_unix_seconds:
        _finite(seconds, f"time of {what}")
    _once((known, form), partial(_check_form, terms, form, what))
    sizes = (8 * count * form.width, 4 * count * form.digests)
    if (len(block.values), len(block.digests)) != sizes:
        raise ReportError(f"{what} has {len(block.values)} and {len(block.digests)} bytes")
    values, place = block.array(), form.first_of_rows
    if np.isnan(values[:, : len(form.places)]).any():
        raise ReportError(f"{what} has a value of no observation")
    negative_W = (values[:, place:] < 0.0).any(axis=0)
    if negative_W.any():
        names = [(terms.families[row.family], at) for row in form.rows for at in row.places]
        for at in np.flatnonzero(negative_W).tolist():
            sent, column = names[at]
            if sent.columns[column] in _unsigned(sent.name):
                raise ReportError(f"{what} has a row with a negative value")


def _check_form(terms: _Terms, form: StepForm, what: str) -> None:
    if not form.ranks or len(form.counts) != len(form.places):
        raise ReportError(f"{what} has no ranks, or counts that do not fit")
    for number in form.counts:
        if not 0 < number <= len(form.ranks):
            raise ReportError(f"{what} has {number} observations on {len(form.ranks)} ranks")
    _ascending(form.places, f"step columns of {what}")
    _below(form.places, len(terms.step_columns), f"step columns of {what}")
    _check_places(terms, form, what)
    for row in form.rows:
        _ascending(row.places, f"columns of {what}")
        _below(row.places, len(terms.families[row.family].columns), f"columns of {what}")


def _check_places(terms: _Terms, step: NodeStep | StepForm, what: str) -> None:
    """Check what rows are of: the same of no two, and only of ranks that delivered the step."""
    _ascending(step.ranks, f"ranks of {what}")
    _among(step.ranks, terms.ranks, f"ranks of {what}")
    _below((step.holding,), len(terms.holdings), f"holding of {what}")
    present, found = set(step.ranks), set()
    for row in step.rows:
        _check_place(terms, row, what)
        if not present.issuperset(row.ranks):
            raise ReportError(f"{what} has rows of ranks that did not deliver it")
        assumed = terms.shares[row.share].assumed
        own = row.ranks if assumed else (row.shards, row.replicas)
        if (row.family, row.share, own) in found:
            raise ReportError(f"{what} has two rows of share {row.share} of ranks {row.ranks[:8]}")
        found.add((row.family, row.share, own))


def _unsigned(family: str) -> frozenset[str]:
    """Return the columns of a family that are never negative."""
    columns = {own.name: own.columns for own in FAMILIES}.get(family, ())
    return frozenset(column.name for column in columns if not column.signed)


def _check_table(terms: _Terms, known: bytes, layers: tuple[int, ...], table: NodeLayers) -> None:
    places = tuple(
        (own.family, own.share, own.layout, own.shards, own.replicas, own.ranks, len(own.values))
        for own in table.blocks
    )
    _once((known, layers, places), partial(_check_blocks, terms, layers, table))


def _check_blocks(terms: _Terms, layers: tuple[int, ...], table: NodeLayers) -> None:
    for block in table.blocks:
        _check_place(terms, block, "layer block")
        _among(block.ranks, terms.ranks, "ranks of a layer block")
        _below((block.layout,), len(layers), "layout of a layer block")
        number, columns = layers[block.layout], len(terms.families[block.family].columns)
        if len(block.values) != number * columns * 8:
            raise ReportError(f"a layer block of {number} layers has {len(block.values)} bytes")


def _check_place(terms: _Terms, row: NodeRow | LayerBlock | RowForm, what: str) -> None:
    _below((row.family,), len(terms.families), f"family of {what}")
    _below((row.share,), len(terms.shares), f"share of {what}")
    share = terms.shares[row.share]
    for indices, limit, name in (
        (row.shards, share.shard_count, "shards"),
        (row.replicas, share.replica_count, "replicas"),
    ):
        _ascending(indices, f"{name} of {what}")
        _below(indices, limit, f"{name} of {what}")
    parts = len(row.shards) * len(row.replicas)
    if not row.ranks or not (share.assumed or parts == len(row.ranks)):
        raise ReportError(f"{what} has a row of {parts} parts and {len(row.ranks)} ranks")


def _unique(names: Sequence[str] | Sequence[int], what: str) -> None:
    if len(set(names)) != len(names):
        raise ReportError(f"{what} are not unique")


def _ascending(numbers: Sequence[int], what: str) -> None:
    if len(numbers) > 1 and any(map(ge, numbers, numbers[1:])):
        raise ReportError(f"{what} do not ascend")


def _below(numbers: Sequence[int], limit: int, what: str) -> None:
    if numbers and max(numbers) >= limit:
        raise ReportError(f"{what}: {max(numbers)} is not below {limit}")


def _among(ranks: Collection[int], known: Collection[int], what: str) -> None:
    if strange := set(ranks).difference(known):
        raise ReportError(f"{what}: {min(strange)} is none of the node's {len(known)} ranks")


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
"""Of a report; incremented with every change that an agent of another version would misread."""
_FORMATS_READ = frozenset({6, FORMAT})
"""Reports of format 6 have no blocks."""
RECEIPT_FORMAT = 6

REPORT_BYTES_MAX = 64 * 2**20

_REPORTS = msgspec.msgpack.Decoder(tuple[int, NodeReport])
_RECEIPTS = msgspec.msgpack.Decoder(tuple[int, Receipt])
_FORMATS = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_PAIR = b"\x92"
_ENCODER = msgspec.msgpack.Encoder()


def encode_report(report: NodeReport) -> bytes:
    """Return a report as bytes."""
    return _ENCODER.encode((FORMAT, report))


def decode_report(data: bytes) -> NodeReport:
    """Decode and check a report. Raises ReportError, which says what is wrong."""
    if len(data) > REPORT_BYTES_MAX:
        raise ReportError(f"a report of {len(data)} bytes; the limit is {REPORT_BYTES_MAX}")
    report: NodeReport = _decode(_REPORTS, data, "report", _FORMATS_READ, FORMAT)
    check_report(report)
    return report


def encode_receipt(receipt: Receipt) -> bytes:
    """Return a receipt as bytes."""
    return _ENCODER.encode((RECEIPT_FORMAT, receipt))


def decode_receipt(data: bytes) -> Receipt:
    """Decode a receipt. Raises ReportError, which says what is wrong."""
    formats = frozenset({RECEIPT_FORMAT})
    receipt: Receipt = _decode(_RECEIPTS, data, "receipt", formats, RECEIPT_FORMAT)
    return receipt


def _decode(
    decoder: "msgspec.msgpack.Decoder[Any]",
    data: bytes,
    what: str,
    formats: frozenset[int],
    newest: int,
) -> Any:
    try:
        # An array of two, the first a small number: it need not be read twice.
        found = data[1] if data[:1] == _PAIR else _FORMATS.decode(data)[0]
        if found not in formats:
            raise ReportError(f"{what} of format {found}; this agent reads format {newest}")
        return decoder.decode(data)[1]
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError) as error:
        raise ReportError(f"not a {what}: {error}") from error
