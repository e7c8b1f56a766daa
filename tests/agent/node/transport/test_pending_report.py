import asyncio
from pathlib import Path

import pytest

from mp_agent.node.transport.client import PendingReport, pack, unpack
from mp_agent.records.node_report import NodeLayers
from tests.agent.node.transport.stubs import StubRun, make_receipt, make_report


@pytest.fixture
def run(tmp_path: Path) -> StubRun:
    return StubRun(tmp_path / "run", root=False)


def sent(outbox: PendingReport) -> int | None:
    body = asyncio.run(outbox.next_body())
    return None if body is None else unpack(body).position


def test_a_report_is_sent_again_until_it_is_answered(run):
    run.waiting = [make_report(1), make_report(2)]
    outbox = PendingReport(run)
    assert [sent(outbox), sent(outbox)] == [1, 1]
    receipt = make_receipt(make_report(1))
    outbox.answered(receipt)
    assert run.receipts == [receipt]
    assert sent(outbox) == 2


def test_a_report_of_an_attempt_that_is_over_is_not_sent(run):
    run.waiting = [make_report(1)]
    outbox = PendingReport(run)
    assert sent(outbox) == 1
    run.session = "second"
    assert sent(outbox) is None
    assert outbox.reports_dropped == 0


def test_a_report_that_cannot_be_read_is_counted_and_its_rows_are_asked_for_again(run):
    run.waiting = [make_report(1), make_report(2)]
    outbox = PendingReport(run)
    assert sent(outbox) == 1
    outbox.refused()
    assert [report.position for report in run.dropped] == [1]
    assert sent(outbox) == 2
    assert outbox.reports_dropped == 1


def test_what_is_too_large_goes_without_its_layers_and_then_not_at_all(run):
    layers = (NodeLayers(sequence=1, blocks=()),)
    with_layers = make_report(1, layers=layers, layers_position=1)
    without = make_report(1, layers_position=1)
    run.waiting = [with_layers, make_report(2, url="".join(map(chr, range(256, 4000))))]
    outbox = PendingReport(run, body_bytes_max=len(pack(without)))
    body = asyncio.run(outbox.next_body())
    assert body is not None
    assert unpack(body) == without
    assert outbox.reports_dropped == 1

    asyncio.run(outbox.too_large())
    assert [report.position for report in run.dropped] == [1]
    assert sent(outbox) is None
    assert [report.position for report in run.dropped] == [1, 2]
    assert outbox.reports_dropped == 3
