import zlib

import pytest

from mp_agent.errors import ReportError, ReportTooLarge
from mp_agent.node.transport import client
from mp_agent.node.transport.client import pack, unpack
from tests.agent.node.transport.stubs import make_report


def test_a_report_arrives_as_it_was_sent():
    report = make_report(7, host="höst")
    assert unpack(pack(report)) == report


def test_a_body_is_compressed():
    assert len(pack(make_report(url="x" * 4000))) < 500


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\x80", zlib.compress(b"no report"), pack(make_report())[:-5]]
)
def test_what_is_no_report_is_refused_with_a_reason(body):
    with pytest.raises(ReportError, match=r"not a report|report of"):
        unpack(body)


def test_a_body_that_unfolds_to_too_much_is_given_up_at_the_limit(monkeypatch):
    monkeypatch.setattr(client, "REPORT_BYTES_MAX", 1000)
    bomb = zlib.compress(b"\0" * 100_000_000, 9)
    assert len(bomb) < 100_000
    with pytest.raises(ReportTooLarge):
        unpack(bomb)
