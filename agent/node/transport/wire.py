"""The wire format between node agents: paths, compression of reports, limits."""

import zlib

from mp_agent.errors import ReportError
from mp_agent.records.reports.report_codec import REPORT_BYTES_MAX, decode_report, encode_report
from mp_agent.records.reports.rows import NodeReport

ROWS_PATH = "/api/v1/rows"
RETIRE_PATH = "/api/v1/retire"
"""Request to a root: another agent has become the root."""
MOVE_PATH = "/api/v1/root"
"""Request of a root: its URL has changed."""
PATHS = frozenset({ROWS_PATH, RETIRE_PATH, MOVE_PATH})
"""Requests to these carry the run's token."""
CONTENT_TYPE = "application/vnd.mp-agent.report+zlib"
"""Not a Content-Encoding: an HTTP library would decompress that without a limit."""

BODY_BYTES_MAX = 16 * 2**20
_COMPRESSION_LEVEL = 1


def pack(report: NodeReport) -> bytes:
    """Return the body of the request that carries a report."""
    return zlib.compress(encode_report(report), _COMPRESSION_LEVEL)


def unpack(body: bytes) -> NodeReport:
    """Return the report in a request's body.

    Raises ReportError, which says what is wrong; decompression stops at `REPORT_BYTES_MAX`.
    """
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(body, REPORT_BYTES_MAX + 1)
    except zlib.error as error:
        raise ReportError(f"not a report: {error}") from error
    if len(data) > REPORT_BYTES_MAX:
        raise ReportTooLarge(f"more than {REPORT_BYTES_MAX} bytes unpacked")
    if not decompressor.eof:
        raise ReportError("not a report: it is truncated")
    return decode_report(data)


class ReportTooLarge(ReportError):
    """A report exceeds the size limit."""
