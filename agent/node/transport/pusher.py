"""Pushes one run's reports to its root agent when they are due, and retries failed pushes."""

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from mp_agent.errors import ReportError
from mp_agent.node.transport.client import (
    LONGEST_SECONDS,
    URGENT,
    Backoff,
    PendingReport,
    PushClient,
    Reply,
    RunOnNode,
)
from mp_agent.node.transport.root_address import RootAddress
from mp_agent.records.node_report import Receipt
from mp_agent.records.reports import decode_receipt
from mp_agent.records.steps import EndReason
from mp_agent.records.views import TransportView

log = logging.getLogger("mp_agent.node")

_JITTER = 0.1
_HURRY_SECONDS = 1.0
"""Trouble is pushed at once, but at most this often."""
_REFUSALS_IN_A_ROW = 3
"""After this many refused reports the next one waits for its regular time."""
_PUT_OFFS_IN_A_ROW = 3
"""A root takes the rows of a node that comes back: what still puts it off is no root."""
_REFUSED_SECONDS = 60.0
"""And four pushes: longer than a root holds to an earlier attempt of a node that is silent."""


class Pusher:
    """Sends reports one after the other, at most one at a time."""

    def __init__(self, run: RunOnNode, client: PushClient, interval_seconds: float) -> None:
        self._run = run
        self._client = client
        self._shortest_seconds = interval_seconds
        self.interval_seconds = interval_seconds
        """Time between two pushes: what the root asks for, or the setting if it does not."""
        self._pending_report = PendingReport(run)
        # The root waits two intervals longer for pushed rows than for its own.
        self._backoff = Backoff(longest_seconds=min(2 * interval_seconds, LONGEST_SECONDS))
        self._root = RootAddress(url="")
        self._task: asyncio.Task[None] | None = None
        self._due_seconds = 0.0
        self._pushed_seconds = -_HURRY_SECONDS
        self._failing = False
        self._put_offs = 0
        """Answers in a row by which the root has put this node off."""
        self._hurried = False
        """Whether the report that is due, or under way, reports trouble."""
        self._fresh = True
        """Whether no report of this attempt has reached this root yet."""
        self._logged: set[str] = set()
        self._taken_seconds = inf
        """When the root last took rows; infinite once it was logged that it takes none."""
        self._counts = TransportView()
        self.accepted_total = 0
        """Reports that a root accepted."""
        self.final_accepted = False
        """Whether the root has the final report, in which all local ranks have ended."""

    @property
    def counts(self) -> TransportView:
        """Counts of what was sent."""
        return replace(
            self._counts,
            reports_dropped=self._pending_report.reports_dropped,
            push_interval_seconds=self.interval_seconds,
        )

    def begin(self) -> None:
        """Push soon: the attempt or its root has changed."""
        self._due_seconds = 0.0
        self._failing = self.final_accepted = False
        self._put_offs = 0
        self.interval_seconds = self._shortest_seconds
        self._fresh = True
        self._taken_seconds = time.monotonic()
        self._backoff.reset()
        self._logged.clear()

    def tick(self, root: RootAddress, now_seconds: float) -> None:
        """Start a push to `root` in the background, if one is due."""
        self._root = root
        ended = self._ended()
        self.final_accepted = self.final_accepted and ended
        hurried = self._run.urgent and now_seconds >= self._pushed_seconds + _HURRY_SECONDS
        waits = self._failing or self._put_offs > 0
        at_once = (hurried or (ended and not self.final_accepted)) and not waits
        self._hurried |= hurried
        if not self.busy and (at_once or now_seconds >= self._due_seconds):
            self._pushed_seconds = now_seconds
            self._task = asyncio.get_running_loop().create_task(self._push_all())

    async def stop(self, deadline_seconds: float) -> None:
        """Push what is left, if the root answers in time; then cancel."""
        if self._root.url and not self._failing:
            if self._task is not None and self.busy:
                await asyncio.wait([self._task], timeout=_left_of(deadline_seconds))
            if not self.busy and not self.final_accepted:
                self._task = asyncio.get_running_loop().create_task(self._push_all())
                await asyncio.wait([self._task], timeout=_left_of(deadline_seconds))
        self.cancel()

    def cancel(self) -> None:
        """Cancel the push in progress."""
        if self._task is not None:
            self._task.cancel()

    @property
    def busy(self) -> bool:
        """Whether a push is in progress."""
        return self._task is not None and not self._task.done()

    async def _push_all(self) -> None:
        """Push until no report is left, or a push fails."""
        root, refusals = self._root, 0
        while (body := await self._next_body()) is not None:
            reply = await self._client.send_rows(root.url, root.token, self._query(root), body)
            try:
                receipt = decode_receipt(reply.body) if reply.ok else None
            except ReportError as error:
                receipt, reply = None, replace(reply, reason=f"its answer: {error}")
            if receipt is None:
                await self._postpone(reply)
                return
            self._settle(receipt, len(body))
            self.interval_seconds = max(reply.pace_seconds, self._shortest_seconds)
            refusals = 0 if receipt.accepted else refusals + 1
            if receipt.accepted:
                self._taken_seconds = time.monotonic()
            if refusals >= _REFUSALS_IN_A_ROW:
                self._note_refused()
                break
        # All agents of a run start in the same second; spread their pushes.
        shortest = 0.0 if self._fresh else 1 - _JITTER
        self._fresh = False
        pause_seconds = self.interval_seconds * random.uniform(shortest, 1)
        self._due_seconds = time.monotonic() + pause_seconds

    async def _next_body(self) -> bytes | None:
        # Asked before the report is made: trouble that one reports is new no longer.
        self._hurried |= self._run.urgent
        return await self._pending_report.next_body()

    def _query(self, root: RootAddress) -> Mapping[str, str]:
        return {
            "run": self._run.name,
            "node": str(self._run.identity.node_rank),
            "attempt": str(root.created_unix_ns),
            **({URGENT: "1"} if self._hurried or self._put_offs else {}),
        }

    def _settle(self, receipt: Receipt, size: int) -> None:
        self.final_accepted = self._pending_report.answered(receipt)
        self.accepted_total += receipt.accepted
        self._counts = replace(
            self._counts,
            pushed_bytes=self._counts.pushed_bytes + size,
            last_push_unix_seconds=time.time(),
        )
        if self._failing:
            log.info("run %s: the root agent at %s answers", self._run.name, self._root.url)
        self._failing = self._hurried = False
        self._put_offs = 0
        self._backoff.reset()
        self._logged.clear()

    def _note_refused(self) -> None:
        """Log, once, that the root has taken no rows for some time."""
        if time.monotonic() >= self._taken_seconds + _REFUSED_SECONDS + 4 * self.interval_seconds:
            self._taken_seconds = inf
            log.warning(
                "run %s: %s takes no rows of node %d: another agent reports under that number, or "
                "has done so until now",
                self._run.name,
                self._root.url,
                self._run.identity.node_rank,
            )

    async def _postpone(self, reply: Reply) -> None:
        if reply.put_off and self._put_offs < _PUT_OFFS_IN_A_ROW:
            self._put_offs += 1
            self._counts = replace(self._counts, pushes_put_off=self._counts.pushes_put_off + 1)
            self._due_seconds = time.monotonic() + reply.retry_after_seconds
            return
        if reply.status == 413:
            await self._pending_report.too_large()
        elif reply.status == 400:
            self._pending_report.refused()
        self._failing = True
        self._counts = replace(self._counts, push_failures=self._counts.push_failures + 1)
        pause_seconds = self._backoff.next_pause_seconds(at_end=self._ended())
        self._due_seconds = time.monotonic() + max(pause_seconds, reply.retry_after_seconds)
        kind = str(reply.status or "no answer")
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "run %s: no rows can be pushed to %s: %s: %s; it is retried",
                self._run.name,
                self._root.url,
                kind,
                reply.reason,
            )

    def _ended(self) -> bool:
        return self._run.end is not EndReason.RUNNING


def _left_of(deadline_seconds: float) -> float:
    return max(deadline_seconds - time.monotonic(), 0.0)
