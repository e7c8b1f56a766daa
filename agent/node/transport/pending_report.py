"""Holds the report that is being sent to the root; later rows wait in the run's queue."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mp_agent.node.transport.wire import BODY_BYTES_MAX, pack
from mp_agent.records.reports.rows import NodeReport, Receipt


class ReportSource(Protocol):
    """The part of `Run` that is used here."""

    @property
    def session(self) -> str:
        """Identifies this node's current attempt; reports of other attempts are obsolete."""

    def next_report(self) -> NodeReport | None:
        """Return a report of what is new since the last call."""

    def acknowledge(self, receipt: Receipt) -> None:
        """Process the root's answer to a report."""

    def report_dropped(self, report: NodeReport) -> None:
        """Have its rows reported again: the root could not read it."""


@dataclass(frozen=True, slots=True)
class _Packet:
    report: NodeReport
    body: bytes


class PendingReport:
    """Holds one report until the root has answered it, so that a retry sends the same one.

    A report that is too large for the root is sent without its layer tables, then dropped.
    """

    def __init__(self, run: ReportSource, *, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._run = run
        self._body_bytes_max = body_bytes_max
        self._packet: _Packet | None = None
        self.reports_dropped = 0
        """Reports that were dropped, completely or except for their step rows."""

    async def next_body(self) -> bytes | None:
        """Return the body to send next; None if there is none."""
        if self._packet is not None and self._packet.report.session != self._run.session:
            self._packet = None
        while self._packet is None:
            report = self._run.next_report()
            if report is None:
                return None
            await self._pack(report)
        return self._packet.body

    def answered(self, receipt: Receipt) -> bool:
        """Release the report: the root has answered it. Return whether it has the final one."""
        packet, self._packet = self._packet, None
        self._run.acknowledge(receipt)
        return packet is not None and packet.report.final and receipt.accepted

    def refused(self) -> None:
        """Drop the report, as the root cannot read it; what it may have held is reported again."""
        packet, self._packet = self._packet, None
        if packet is not None:
            self.reports_dropped += 1
            self._run.report_dropped(packet.report)

    async def too_large(self) -> None:
        """Shrink the report, or drop it."""
        packet, self._packet = self._packet, None
        if packet is not None:
            await self._shrink(packet.report)

    async def _pack(self, report: NodeReport) -> None:
        # In a thread: packing a table of all layers would delay the polling of the rings.
        body = await asyncio.to_thread(pack, report)
        if len(body) > self._body_bytes_max:
            await self._shrink(report)
        else:
            self._packet = _Packet(report, body)

    async def _shrink(self, report: NodeReport) -> None:
        self.reports_dropped += 1
        if report.layers:
            await self._pack(msgspec.structs.replace(report, layers=(), layouts=()))
