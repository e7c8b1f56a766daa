"""One run on this node, from poll to poll: rings come in, views, reports and a ledger go out."""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from mp_agent.errors import ReportError
from mp_agent.exporters.status_page.history import StepHistory
from mp_agent.node.cluster.member import MemberItem
from mp_agent.node.collect.attempt import LocalAttempt
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.run.admission import admit, look_at_rivals
from mp_agent.node.run.launches import by_launch
from mp_agent.node.run.ring_finder import RingFinder, remove_ring
from mp_agent.node.run.state import RunState
from mp_agent.node.run.unwatched_ranks import UnwatchedRanks
from mp_agent.node.run.views import run_export
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.flight import FlightRequest
from mp_agent.records.merged import MergedStep
from mp_agent.records.rows import KnownNode, NodeReport, Receipt
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason
from mp_agent.settings import Settings


class Run:
    """Reads, merges and accounts for one run; the newest attempt replaces the one before it."""

    def __init__(self, run_dir: Path, settings: Settings, *, setting_errors: int = 0) -> None:
        """Take up what an earlier node agent committed; setting_errors: this agent's own."""
        self.run_dir = run_dir
        self._state = RunState(run_dir, settings)
        self._setting_errors = setting_errors + self._state.ignored_settings
        self._finder = RingFinder(run_dir)
        self._unwatched = UnwatchedRanks()
        self._now_seconds = 0.0
        self.flight_request: FlightRequest | None = None
        """The last record that the root wants of all nodes: set there, elsewhere told by it."""

    @property
    def seen(self) -> bool:
        """Whether any rank of the run has shown itself."""
        return self.attempt.seen

    @property
    def name(self) -> str:
        """Name of the run; of its directory while no rank is known."""
        return self.identity.run if self.seen else self.run_dir.name

    @property
    def identity(self) -> RankIdentity:
        """Of the lowest local rank. Only once a rank was `seen`."""
        return self.attempt.identity

    @property
    def attempt(self) -> LocalAttempt:
        """The present attempt, as this node's ranks show it."""
        return self._state.attempt

    @property
    def session(self) -> str:
        """Name of this node's present attempt; reports of another session are worthless."""
        return self._state.member.session

    @property
    def created_unix_ns(self) -> frozenset[int]:
        """When the rings of the present attempt were made, by this node's clock."""
        return self.attempt.created_unix_ns

    @property
    def end(self) -> EndReason:
        """How the newest attempt ended: at the root on all nodes, elsewhere on this one."""
        return self._state.member.end

    @property
    def conditions(self) -> ConditionTracker:
        """What the run suffers from, by the agent's own judgement; only at the root."""
        return self._state.conditions

    @property
    def history(self) -> StepHistory:
        """The last steps, for the status page."""
        return self._state.step_ingest.history

    @property
    def is_root(self) -> bool:
        """Whether this node holds rank 0: it merges what all nodes report."""
        return self._state.member.is_root

    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        """The nodes of the run that are known, by node rank; only the root knows others."""
        return self._state.member.nodes

    @property
    def url(self) -> str:
        """Base URL under which other nodes reach this agent; the transport sets it."""
        return self._state.member.url

    @url.setter
    def url(self, url: str) -> None:
        self._state.member.url = url

    @property
    def urgent(self) -> bool:
        """Whether the root should have a report at once: trouble began since the last one."""
        return self._state.member.urgent

    def poll(self, now_seconds: float) -> None:
        """Read what is new in the rings, merge it, take it in and judge it."""
        self._now_seconds = now_seconds
        for rings in by_launch(self._finder.new_rings()):
            admit(rings, self._state, settle=self._settle)
        self._take(self._state.member.poll(now_seconds))
        look_at_rivals(self._state, settle=self._settle)
        self._state.departed_ranks.look(self.attempt.sources, now_seconds)
        self._unwatched.look(self.name, self.attempt, now_seconds)
        if self.seen and self.is_root:
            self._state.look(now_seconds)
            self._state.uncommitted |= self.conditions.tick(now_seconds, self._present)

    def export(
        self,
        now_seconds: float,
        time_unix_seconds: float,
        *,
        scrape_duration_seconds: float | None = None,
    ) -> RunExport:
        """Return all views of the run. Only once a rank was `seen`."""
        totals = self._state.totals
        return run_export(
            self._state,
            replace(
                totals,
                setting_errors=totals.setting_errors + self._setting_errors,
                records_dropped=totals.records_dropped + self._finder.refused,
            ),
            now_seconds=now_seconds,
            time_unix_seconds=time_unix_seconds,
            scrape_duration_seconds=scrape_duration_seconds,
        )

    def count_dropped_series(self, series: int) -> None:
        """Add what `max_series` left out of an export."""
        self._state.count_dropped_series(series)

    def take_report(self) -> NodeReport | None:
        """Return what is new since the last call, for the root; None at the root itself.

        Also None soon after a report, unless rows are left over, are to be sent again, or a rank
        has ended. Rows are kept, within bounds, until a receipt says that they are settled: a
        report may be lost, or sent twice. Reports are to be sent in the order of the calls.
        """
        return self._state.member.take_report()

    def receive(self, report: NodeReport) -> Receipt:
        """Take another node's report in, at the root; the answer goes back to the node.

        A report may come twice, late, or be of an earlier attempt. Raises ReportError when it is
        of another run, or contradicts what is known of this one.
        """
        if report.run != self.name:
            raise ReportError(f"a report of run {report.run!r}, not of {self.name!r}")
        receipt = self._state.member.receive(report)
        news = self.conditions.recent_news(self._now_seconds)
        return structs.replace(receipt, flight=self.flight_request, conditions=news)

    def acknowledge(self, receipt: Receipt) -> None:
        """Take the root's answer to a report in: free what is settled, send again what is lost."""
        if receipt.session == self.session:
            self.flight_request = receipt.flight
            self.conditions.take_over(receipt.conditions)
        self._state.uncommitted |= self._state.member.acknowledge(receipt)

    def commit(self) -> None:
        """Write the account to the ledger, if it has changed; a full directory is only logged."""
        self._state.commit()

    def anything_new(self) -> bool:
        """Return whether a ring has appeared that was not read yet."""
        return self._finder.anything_new()

    @property
    def rings_looked_at(self) -> tuple[Path, ...]:
        """All rings that were found, those included that were refused."""
        return self._finder.looked_at

    def remove_rings(self) -> None:
        """Delete the rings of the newest attempt: the run is over."""
        for source in self.attempt.sources.values():
            remove_ring(source.path)

    def close(self) -> None:
        """Let go of the rings."""
        self.attempt.close()
        self._state.name_conflicts.close()

    def _settle(self) -> None:
        """Take in what the present attempt still yields: the next one has begun."""
        member = self._state.member
        self._take(member.poll(self._now_seconds))
        self._take(member.close_all())

    def _take(self, items: Iterable[MemberItem]) -> None:
        for item in items:
            self._state.uncommitted = True
            self._state.step_ingest.take(item)
            if isinstance(item, MergedStep):
                progress = self._state.account.progress
                self.conditions.after_step(progress, self._now_seconds, self._present)

    def _present(self) -> RunExport:
        return self.export(self._now_seconds, time.time())
