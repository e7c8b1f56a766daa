"""Reports and receipts as bytes, and back; what is read is checked."""

from typing import Any

import msgspec

from mp_agent.errors import ReportError
from mp_agent.records.reports.row_checks import check_report
from mp_agent.records.reports.rows import NodeReport, Receipt

FORMAT = 6
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
