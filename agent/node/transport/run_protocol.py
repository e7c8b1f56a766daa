"""The interface between the transport and a run."""

from pathlib import Path
from typing import Protocol

from mp_agent.node.transport.pending_report import ReportSource
from mp_agent.records.reports.rows import KnownNode, NodeReport, Receipt
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason


class RunOnNode(ReportSource, Protocol):
    """The part of `Run` that the transport uses."""

    run_dir: Path
    url: str
    """URL at which other nodes reach this agent; set by the transport."""

    @property
    def seen(self) -> bool:
        """Whether a ring of the run has been found; the rest is valid only then."""

    @property
    def end(self) -> EndReason:
        """How the local ranks ended; RUNNING while one runs."""

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
        """When the rings of the current attempt were created, by this node's clock."""

    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        """The known nodes of the run."""

    @property
    def urgent(self) -> bool:
        """Whether a report is due at once."""

    def receive(self, report: NodeReport) -> Receipt:
        """Merge another node's report."""
