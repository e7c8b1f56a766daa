"""One run on this node: assigns new rings to its attempts, and accepts what they bring."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from mp_agent.errors import ReportError
from mp_agent.exporters.status_page.report import StepHistory
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.collect.attempt import LocalAttempt, LocalStep
from mp_agent.node.collect.rank_source import RankSource
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.run.launches import (
    LaunchStatus,
    RingFinder,
    Rings,
    by_launch,
    committed,
    launch_of,
    remove_ring,
)
from mp_agent.node.run.state import GRACE_SECONDS, RunState, UnwatchedRanks
from mp_agent.node.run.views import (
    SCRIPT_FACT,
    ServiceCounts,
    run_collections,
    run_export,
    run_facts,
)
from mp_agent.node.series.snapshot_builder import RunExport
from mp_agent.records.flight import FlightRequest
from mp_agent.records.merged import MergedStep
from mp_agent.records.node_report import KnownNode, NodeReport, Receipt
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason
from mp_agent.records.views import ScriptFindings
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")


def admit(
    rings: Rings,
    state: RunState,
    *,
    finish_attempt: Callable[[], None],
    lost: Mapping[Path, int] | None = None,
    patient: bool = False,
) -> bool:
    """Start to read the rings of one launch, unless it is already over or has to wait.

    Returns False, with the rings closed, where they are to be opened again later. patient: wait
    for ranks that have not left the current attempt; otherwise the launch counts as another job's.

    finish_attempt: accounts for the rest of the current attempt; called before the next one begins.
    lost: by ring, the step up to which its records count as lost and are not read.
    """
    if state.name_conflicts.join(rings):
        return True
    status = state.launches.status_of(rings, state.attempt)
    if status is LaunchStatus.NOT_YET and patient:
        for _, reader in rings:
            reader.close()
        return False
    lost = lost or {path: state.counted_conflicts.get(str(path), 0) for path, _ in rings}
    if status in (LaunchStatus.NAME_CONFLICT, LaunchStatus.NOT_YET):
        state.name_conflicts.add(rings, counted=lost)
        return True
    if status is LaunchStatus.OVER:
        _discard(rings, state, lost)
        return True
    if status is LaunchStatus.NEXT:
        finish_attempt()
        _begin_attempt(rings, state)
    state.launches.add(rings)
    state.uncommitted = True
    after, layers_after = state.member.closed
    for path, reader in rings:
        begin = max(after, lost[path])
        state.attempt.add(RankSource(path, reader, after=begin, layers_after=layers_after))
    return True


def poll_name_conflicts(state: RunState, *, finish_attempt: Callable[[], None]) -> None:
    """Count the records of jobs with a conflicting name; admit them once the first job is over."""
    if not state.name_conflicts.active:
        return
    state.uncommitted = True
    if state.attempt.end is EndReason.RUNNING and state.attempt.alive:
        state.name_conflicts.poll()
        return
    for rings, lost in state.name_conflicts.release():
        admit(rings, state, finish_attempt=finish_attempt, lost=lost)


def _begin_attempt(rings: Rings, state: RunState) -> None:
    """Replace the attempt; its rings are deleted only once their contents are in the ledger."""
    before = state.attempt
    state.begin_attempt(rings)
    on_disk = state.commit()
    number = rings[0][1].identity.attempt
    for source in before.sources.values():
        log.info("rank %d: attempt %d takes over", source.identity.rank, number)
        source.close()
        if on_disk:
            remove_ring(source.path)


def _discard(rings: Rings, state: RunState, lost: Mapping[Path, int]) -> None:
    """Close the rings; delete them unless they are in use.

    Rings that an earlier agent has read completely only remained to be deleted. The records in
    other rings will not be read: they count as lost.
    """
    read = launch_of(rings) in state.launches.read
    for path, reader in rings:
        if not read:
            state.count_lost(max(committed(reader) - lost[path], 0))
        if not reader.writer_alive():
            remove_ring(path)
        reader.close()


class Run:
    """Reads, merges and accounts for one run; a new attempt replaces the one before it."""

    def __init__(self, run_dir: Path, settings: Settings, *, setting_errors: int = 0) -> None:
        """Continue from what an earlier node agent committed; setting_errors: this agent's own."""
        self.run_dir = run_dir
        self._state = RunState(run_dir, settings)
        self._setting_errors = setting_errors + self._state.ignored_settings
        self._finder = RingFinder(run_dir)
        self._unwatched = UnwatchedRanks()
        self._now_seconds = 0.0
        self._late_seconds: float | None = None
        """Since when the next attempt waits for ranks that have not left the current one."""
        self.flight_request: FlightRequest | None = None
        """The last record that the root requests of all nodes; received from it elsewhere."""

    @property
    def seen(self) -> bool:
        """Whether a ring of the run has been found."""
        return self.attempt.seen

    @property
    def name(self) -> str:
        """Name of the run; of its directory until a rank is known."""
        return self.identity.run if self.seen else self.run_dir.name

    @property
    def identity(self) -> RankIdentity:
        """Identity of the lowest local rank; only once a rank was `seen`."""
        return self.attempt.identity

    @property
    def attempt(self) -> LocalAttempt:
        """The current attempt on this node."""
        return self._state.attempt

    @property
    def session(self) -> str:
        """Identifies this node's current attempt; reports of other sessions are obsolete."""
        return self._state.member.session

    @property
    def created_unix_ns(self) -> frozenset[int]:
        """When the rings of the current attempt were created, by this node's clock."""
        return self.attempt.created_unix_ns

    @property
    def end(self) -> EndReason:
        """How the newest attempt ended: at the root on all nodes, elsewhere on this node."""
        return self._state.member.end

    @property
    def missing_rows(self) -> int:
        """Rows of other nodes that the newest attempt has ended without; only the root knows."""
        return self._state.member.missing_rows

    @property
    def conditions(self) -> ConditionTracker:
        """The conditions judged by this agent; only at the root."""
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
        """The known nodes of the run, by node rank; only the root knows others."""
        return self._state.member.nodes

    @property
    def script(self) -> str:
        """Path of the main script that the job wants checked; "" for none."""
        return run_facts(self._state.member).get(SCRIPT_FACT, "")

    @property
    def script_findings(self) -> ScriptFindings | None:
        """What the check of the main script found; `ScriptChecks` sets it."""
        return self._state.script_findings

    @script_findings.setter
    def script_findings(self, findings: ScriptFindings) -> None:
        self._state.script_findings = findings

    @property
    def url(self) -> str:
        """Base URL under which other nodes reach this agent; the transport sets it."""
        return self._state.member.url

    @url.setter
    def url(self, url: str) -> None:
        self._state.member.url = url

    @property
    def urgent(self) -> bool:
        """Whether to report at once: trouble began since the last report."""
        return self._state.member.urgent

    @property
    def longest_pace_seconds(self) -> float:
        """Longest time between pushes for which the root can keep the run's steps open."""
        return self._state.member.longest_pace_seconds

    def follow_pace(self, pace_seconds: float) -> None:
        """At the root, wait for rows of nodes that push this often."""
        self._state.follow_pace(pace_seconds)

    def postpone(self, seconds: float) -> None:
        """At the root, wait so much longer for rows of other nodes: this agent was stopped."""
        self._state.member.postpone(seconds)

    def poll(self, now_seconds: float) -> None:
        """Read what is new in the rings, merge it, account for it and judge it."""
        self._now_seconds = now_seconds
        for rings in by_launch(self._finder.new_rings(), self._state.launches.known):
            since_seconds = now_seconds if self._late_seconds is None else self._late_seconds
            patient = now_seconds - since_seconds < GRACE_SECONDS
            if admit(rings, self._state, finish_attempt=self._finish_attempt, patient=patient):
                self._late_seconds = None
                continue
            self._late_seconds = since_seconds
            for path, _ in rings:
                self._finder.forget(path)
        self._fold_local(self._state.member.collect(now_seconds))
        self._fold_merged(self._state.member.merge())
        poll_name_conflicts(self._state, finish_attempt=self._finish_attempt)
        self._finder.forget_removed()
        self._state.departed_ranks.update(self.attempt.sources, now_seconds)
        self._unwatched.check(self.name, self.attempt, now_seconds)
        self.conditions.publish_again()
        if self.seen and self.is_root:
            self._state.update_standstill(now_seconds)
            self._state.uncommitted |= self.conditions.tick(now_seconds, self._current_export)

    def export(
        self,
        now_seconds: float,
        time_unix_seconds: float,
        *,
        services: ServiceCounts | None = None,
        superseded: bool = False,
    ) -> RunExport:
        """Return all views of the run. Only once a rank was `seen`.

        services: counts of the node agent's services. superseded: another root exports the run.
        """
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
            services=services or ServiceCounts(),
            superseded=superseded,
        )

    def count_dropped_series(self, series: int) -> None:
        """Count series that `max_series` left out of an export."""
        self._state.count_dropped_series(series)

    def next_report(self) -> NodeReport | None:
        """Return a report of what is new since the last call; None at the root itself.

        Also None soon after a report, unless rows are left over, must be sent again, or a rank has
        ended. Rows are kept, within bounds, until a receipt settles them: a report may be lost, or
        sent twice. Reports must be sent in the order of the calls.
        """
        return self._state.member.next_report()

    def receive(self, report: NodeReport) -> Receipt:
        """At the root, merge another node's report; return the answer to that node.

        A report may arrive twice, late, or from an earlier attempt. Raises ReportError when it is
        of another run, or contradicts what is known of this one.
        """
        if report.run != self.name:
            raise ReportError(f"a report of run {report.run!r}, not of {self.name!r}")
        receipt = self._state.member.receive(report)
        news = self.conditions.recent_news(self._now_seconds)
        return structs.replace(receipt, flight=self.flight_request, conditions=news)

    def acknowledge(self, receipt: Receipt) -> None:
        """Process the root's answer to a report: free what is settled, resend what was lost."""
        if receipt.session == self.session:
            self.flight_request = receipt.flight
            self.conditions.adopt_from_root(receipt.conditions)
        self._state.uncommitted |= self._state.member.acknowledge(receipt)

    def report_dropped(self, report: NodeReport, *, too_large: bool = False) -> None:
        """Report the rows of a report again that the root could not read."""
        self._state.member.report_dropped(report, too_large=too_large)

    def commit(self) -> None:
        """Write the account to the ledger if it has changed; a full directory is only logged."""
        self._state.commit()

    def has_new_rings(self) -> bool:
        """Return whether a ring has appeared that was not opened yet."""
        return self._finder.has_new()

    @property
    def known_rings(self) -> tuple[Path, ...]:
        """The rings that were found and not removed since, refused ones included."""
        return self._finder.known

    def remove_rings(self) -> None:
        """Delete the rings of the newest attempt: the run is over."""
        for source in self.attempt.sources.values():
            remove_ring(source.path)

    def close(self) -> None:
        """Close the rings."""
        self.attempt.close()
        self._state.name_conflicts.close()

    def _finish_attempt(self) -> None:
        """Account for what the current attempt still holds: the next one has begun."""
        member = self._state.member
        self._fold_local(member.collect(self._now_seconds, final=True))
        self._fold_merged(member.merge(final=True))

    def _fold_local(self, steps: Iterable[LocalStep]) -> None:
        for step in steps:
            self._state.uncommitted = True
            self._state.step_ingest.fold_local(step)

    def _fold_merged(self, items: Iterable[MergedStep | MergedTable]) -> None:
        for item in items:
            self._state.uncommitted = True
            if isinstance(item, MergedTable):
                collections = run_collections(self._state.member)
                self._state.step_ingest.fold_layers(item, collections)
                continue
            self._state.step_ingest.fold_step(item)
            account = self._state.account
            self.conditions.after_step(account, self._now_seconds, self._current_export)

    def _current_export(self) -> RunExport:
        return self.export(self._now_seconds, time.time())
