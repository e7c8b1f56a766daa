"""What the transport asks of a run and tells it."""

from pathlib import Path
from typing import Protocol

from mp_agent.node.transport.pending_report import ReportSource
from mp_agent.records.rows import KnownNode, NodeReport, Receipt
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason


class RunOnNode(ReportSource, Protocol):
    """What is used of a `Run`."""

    run_dir: Path
    url: str
    """Under which others reach this agent; set by the transport."""

    @property
    def seen(self) -> bool:
        """Whether any rank of the run has shown itself; the rest may be asked only then."""

    @property
    def end(self) -> EndReason:
        """How the local ranks ended; RUNNING while one goes on."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def is_root(self) -> bool:
        """Whether this node holds rank 0."""

    @property
    def identity(self) -> RankIdentity:
        """Of the lowest local rank."""

    @property
    def created_unix_ns(self) -> frozenset[int]:
        """When the rings of the present attempt were made, by this node's clock."""

    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        """The nodes of the run as far as they are known."""

    @property
    def urgent(self) -> bool:
        """Whether the root should have a report at once."""

    def receive(self, report: NodeReport) -> Receipt:
        """Take another node's report in."""
