"""What goes over the wire between node agents: paths, the packing of reports, and their limits."""

import zlib

from mp_agent.errors import ReportError
from mp_agent.records.report_codec import REPORT_BYTES_MAX, decode_report, encode_report
from mp_agent.records.rows import NodeReport

ROWS_PATH = "/api/v1/rows"
RETIRE_PATH = "/api/v1/retire"
"""To a root: the run goes on under another one."""
MOVE_PATH = "/api/v1/root"
"""From a root: it is to be found at another URL."""
PATHS = frozenset({ROWS_PATH, RETIRE_PATH, MOVE_PATH})
"""Whoever asks for one of these shows the run's token."""
CONTENT_TYPE = "application/vnd.mp-agent.report+zlib"
"""Not a Content-Encoding: an HTTP library would unpack that by itself, without a limit."""

BODY_BYTES_MAX = 16 * 2**20
_COMPRESSION_LEVEL = 1


def pack(report: NodeReport) -> bytes:
    """Return the body of the request that carries a report."""
    return zlib.compress(encode_report(report), _COMPRESSION_LEVEL)


def unpack(body: bytes) -> NodeReport:
    """Return the report in a request's body.

    Raises ReportError, which says what is wrong; a body that would unfold to more than
    `REPORT_BYTES_MAX` is given up at that size.
    """
    unfolding = zlib.decompressobj()
    try:
        data = unfolding.decompress(body, REPORT_BYTES_MAX + 1)
    except zlib.error as error:
        raise ReportError(f"not a report: {error}") from error
    if len(data) > REPORT_BYTES_MAX:
        raise ReportTooLarge(f"more than {REPORT_BYTES_MAX} bytes unpacked")
    if not unfolding.eof:
        raise ReportError("not a report: it is cut short")
    return decode_report(data)


class ReportTooLarge(ReportError):
    """A report has more bytes than are taken in."""
