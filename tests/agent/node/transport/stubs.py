"""A run as the transport sees it, without rings, and an agent's HTTP server on a free port."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

from aiohttp import web

from mp_agent.errors import ReportError
from mp_agent.node.endpoint import Endpoint, open_listener
from mp_agent.node.http.connections import AnswerAtOnce, GuardedListener
from mp_agent.node.transport.root_link import RootLink
from mp_agent.records.node_report import KnownNode, NodeReport, Receipt
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason
from mp_agent.ring.run_files import RootNote, write_root_note
from tests.agent.node.builders import make_identity

CREATED_UNIX_NS = 5_000


def make_report(sequence: int = 1, **changes: Any) -> NodeReport:
    facts: dict[str, Any] = {
        "run": "llama",
        "session": "first",
        "attempt": 0,
        "world_size": 4,
        "node_rank": 1,
        "host": "host1",
        "url": "http://10.0.0.2:9464",
        "sent_unix_seconds": 100.0,
        "expected_ranks": (2, 3),
        "known_ranks": (2, 3),
        "statuses": (),
        "final": False,
        "held": (),
        "probe_errors": 0,
        "records_dropped": 0,
        "step_columns": (),
        "families": (),
        "shares": (),
        "holdings": (),
        "layouts": (),
        "after": sequence - 1,
        "oldest": 0,
        "position": sequence,
        "steps": (),
        "layers_after": 0,
        "layers_oldest": 0,
        "layers_position": 0,
        "layers": (),
    }
    return NodeReport(**{**facts, **changes})


def make_receipt(report: NodeReport, *, accepted: bool = True) -> Receipt:
    return Receipt(
        session=report.session,
        accepted=accepted,
        position=report.position,
        layers_position=0,
        settled=0,
        layers_settled=0,
    )


class StubRun:
    """Has the reports that the test puts into `waiting`, and notes what becomes of them."""

    def __init__(self, run_dir: Path, *, root: bool, name: str = "llama") -> None:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.run_dir = run_dir
        self.url = ""
        self.seen = True
        self.is_root = root
        self.name = name
        self.end = EndReason.RUNNING
        self.urgent = False
        self.session = "first"
        self.identity: RankIdentity = make_identity(
            0 if root else 2, run=name, world_size=4, local_world_size=2, node_rank=int(not root)
        )
        self.created_unix_ns = frozenset({CREATED_UNIX_NS})
        self.waiting: list[NodeReport] = []
        self.received: list[NodeReport] = []
        self.receipts: list[Receipt] = []
        self.dropped: list[NodeReport] = []
        self.failure: Exception | None = None
        self.takes = True
        self.nodes: tuple[KnownNode, ...] = ()
        self.longest_pace_seconds = inf
        self.pace_seconds = 0.0

    def follow_pace(self, pace_seconds: float) -> None:
        self.pace_seconds = pace_seconds

    def next_report(self) -> NodeReport | None:
        return self.waiting.pop(0) if self.waiting else None

    def acknowledge(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)

    def report_dropped(self, report: NodeReport, *, too_large: bool = False) -> None:
        self.dropped.append(report)

    def receive(self, report: NodeReport) -> Receipt:
        if self.failure is not None:
            raise self.failure
        if report.run != self.name:
            raise ReportError(f"a report of run {report.run!r}")
        self.received.append(report)
        return make_receipt(report, accepted=self.takes)

    def note(self, **changes: Any) -> None:
        """Write what the job's store returned."""
        facts: dict[str, Any] = {
            "asked_by_unix_ns": CREATED_UNIX_NS,
            "created_unix_ns": 77,
            "token": "secret",
        }
        write_root_note(self.run_dir, RootNote(**{**facts, **changes}))


@asynccontextmanager
async def serving(
    routes: Sequence[web.RouteDef], *, at_once: AnswerAtOnce | None = None, port: int = 0
) -> AsyncIterator[Endpoint]:
    """Serve the routes while the block lasts."""
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    listener = open_listener("127.0.0.1", port)
    assert runner.server is not None
    guarded = GuardedListener(runner.server, at_once=at_once)
    try:
        await guarded.start(listener)
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
    finally:
        guarded.close()
        await runner.cleanup()


def named(*links: RootLink) -> Any:
    """Return what finds a link by its run's name."""
    return {link.run.name: link for link in links}.get
