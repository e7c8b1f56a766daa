"""One run on this node: its attempts, one after the other, in one account."""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from mp_agent.alerting.site import usable_values
from mp_agent.catalog.thresholds import resolve
from mp_agent.errors import ReportError
from mp_agent.exporters.status_page.history import StepHistory
from mp_agent.node.accumulate import Accumulator
from mp_agent.node.attempt import Attempt, LocalStep
from mp_agent.node.book import as_utf8
from mp_agent.node.conditions import ConditionTracker
from mp_agent.node.counters import CounterBook
from mp_agent.node.exchange import Exchange, Item
from mp_agent.node.finder import RingFinder, remove_ring, rings_by_launch
from mp_agent.node.governor import LayerGovernor
from mp_agent.node.ledger import Launch, Ledger, read_ledger, write_ledger
from mp_agent.node.root import MergedTable
from mp_agent.node.snapshot_builder import RunExport
from mp_agent.node.source import RankSource
from mp_agent.node.table_shelf import KeptTable
from mp_agent.node.views import add_attempt, agent_view, rank_view, run_view
from mp_agent.node.window import ValueWindow
from mp_agent.records.flight import FlightRequest
from mp_agent.records.merged import MergedStep
from mp_agent.records.rows import KnownNode, NodeReport, Receipt
from mp_agent.records.schema import RankIdentity
from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

Rings = list[tuple[Path, RingReader]]

_JUDGEMENTS_KEPT = 4096


class Run:
    """Reads, merges and accounts for one run; the newest attempt replaces the one before it."""

    def __init__(self, run_dir: Path, settings: Settings, *, setting_errors: int = 0) -> None:
        """Take up what an earlier node agent committed; setting_errors: this agent's own."""
        self.run_dir = run_dir
        self._settings = settings
        values, ignored = usable_values(settings, time_scale=settings.time_scale)
        self._setting_errors = setting_errors + ignored
        ledger = read_ledger(locations.ledger_path(run_dir))
        self._launches = set(ledger.launches)
        self._newest_unix_ns = ledger.newest_unix_ns
        self._totals = ledger.agent
        self._account = Accumulator(
            resolve(settings.thresholds),
            progress=ledger.progress,
            counters=CounterBook(ledger.totals, ledger.histograms),
            norms=ValueWindow(settings.window_seconds, ledger.norms),
        )
        self._now_seconds = 0.0
        self.conditions = ConditionTracker(
            run_dir,
            values,
            memory=ledger.conditions,
            earlier=self._account.counters if ledger.launches else None,
        )
        """What the run suffers from, by the agent's own judgement; only at the root."""
        self._attempt = Attempt(
            settings.merge_deadline_seconds,
            closed_sequence=ledger.closed_sequence,
            closed_layers_sequence=ledger.closed_layers_sequence,
        )
        self._exchange = Exchange(
            self._attempt,
            settings,
            session=ledger.session,
            assumed=ledger.assumed,
            retired_sessions=ledger.retired_sessions,
        )
        self._governor = LayerGovernor(ledger.governor)
        self._counted_sequence = ledger.counted_sequence
        self.history = StepHistory()
        """The last steps, for the status page."""
        self._finder = RingFinder(run_dir)
        self._judged: dict[int, frozenset[str]] = {}
        self._gone_since_seconds: dict[int, float] = {}
        self._uncommitted = False
        self.flight_request: FlightRequest | None = None
        """The last record that the root wants of all nodes: set there, elsewhere told by it."""

    @property
    def seen(self) -> bool:
        """Whether any rank of the run has shown itself."""
        return bool(self._attempt.sources)

    @property
    def end(self) -> EndReason:
        """How the newest attempt ended: at the root on all nodes, elsewhere on this one."""
        return self._exchange.end

    @property
    def local_end(self) -> EndReason:
        """How the newest attempt ended on this node."""
        return self._attempt.end

    @property
    def newest_sequence(self) -> int:
        """The last step that a rank of this node began or wrote."""
        states = [source.state for source in self._attempt.sources.values()]
        return max((max(s.started_sequence, s.committed_sequence) for s in states), default=0)

    @property
    def kept_tables(self) -> tuple[KeptTable, ...]:
        """The layer tables that were read last, for flight records."""
        return self._attempt.shelf.tables

    @property
    def name(self) -> str:
        """Name of the run; of its directory while no rank is known."""
        return self._attempt.identity.run if self.seen else self.run_dir.name

    @property
    def is_root(self) -> bool:
        """Whether this node holds rank 0: it merges what all nodes report."""
        return self._exchange.is_root

    @property
    def url(self) -> str:
        """Base URL under which other nodes reach this agent; the transport sets it."""
        return self._exchange.url

    @url.setter
    def url(self, url: str) -> None:
        self._exchange.url = url

    @property
    def identity(self) -> RankIdentity:
        """Of the lowest local rank. Only once a rank was `seen`."""
        return self._attempt.identity

    @property
    def created_unix_ns(self) -> frozenset[int]:
        """When the rings of the present attempt were made, by this node's clock."""
        sources = self._attempt.sources.values()
        return frozenset(source.identity.created_unix_ns for source in sources)

    @property
    def session(self) -> str:
        """Name of this node's present attempt; reports of another session are worthless."""
        return self._exchange.session

    @property
    def nodes(self) -> tuple[KnownNode, ...]:
        """The nodes of the run that are known, by node rank; only the root knows others."""
        return self._exchange.nodes

    @property
    def urgent(self) -> bool:
        """Whether the root should have a report at once: trouble began since the last one."""
        return self._exchange.urgent

    def take_report(self) -> NodeReport | None:
        """Return what is new since the last call, for the root; None at the root itself.

        Also None soon after a report, unless rows are left over, are to be sent again, or a rank
        has ended. Rows are kept, within bounds, until a receipt says that they are settled: a
        report may be lost, or sent twice. Reports are to be sent in the order of the calls.
        """
        return self._exchange.take_report()

    def receive(self, report: NodeReport) -> Receipt:
        """Take another node's report in, at the root; the answer goes back to the node.

        A report may come twice, late, or be of an earlier attempt. Raises ReportError when it is
        of another run, or contradicts what is known of this one.
        """
        if report.run != as_utf8(self.name):
            raise ReportError(f"a report of run {report.run!r}, not of {self.name!r}")
        receipt = self._exchange.receive(report)
        news = self.conditions.recent_news(self._now_seconds)
        return structs.replace(receipt, flight=self.flight_request, conditions=news)

    def acknowledge(self, receipt: Receipt) -> None:
        """Take the root's answer to a report in: free what is settled, send again what is lost."""
        if receipt.session == self.session:
            self.flight_request = receipt.flight
            self.conditions.take_over(receipt.conditions)
        self._uncommitted |= self._exchange.acknowledge(receipt)

    def poll(self, now_seconds: float) -> None:
        """Read what is new in the rings, merge it, fold it in and judge it."""
        self._now_seconds = now_seconds
        for rings in rings_by_launch(self._finder.new_rings()):
            self._admit(rings, now_seconds)
        self._fold(self._exchange.poll(now_seconds))
        for rank, source in self._attempt.sources.items():
            if source.end is EndReason.RUNNING:
                self._gone_since_seconds.pop(rank, None)
            else:
                self._gone_since_seconds.setdefault(rank, now_seconds)
        if self.seen and self.is_root:
            self._uncommitted |= self.conditions.tick(now_seconds, self._present)

    def export(
        self,
        now_seconds: float,
        time_unix_seconds: float,
        *,
        scrape_duration_seconds: float | None = None,
    ) -> RunExport:
        """Return all views of the run. Only once a rank was `seen`."""
        attempt, account = self._attempt, self._account
        totals = add_attempt(self._totals, self._exchange)
        holds_root = self.is_root
        return RunExport(
            run=self.name,
            node_rank=attempt.identity.node_rank,
            view=run_view(self._exchange, account, self.conditions, time_unix_seconds)
            if holds_root
            else None,
            layers=tuple(account.layers.values()) if holds_root else (),
            ranks=[rank_view(source) for _, source in sorted(attempt.sources.items())],
            faded_ranks=self._faded_ranks(now_seconds),
            agent=agent_view(
                attempt,
                replace(
                    totals,
                    setting_errors=totals.setting_errors + self._setting_errors,
                    records_dropped=totals.records_dropped + self._finder.refused,
                ),
                scrape_duration_seconds=scrape_duration_seconds,
            ),
            counters=account.counters,
            governor=self._governor,
        )

    def count_dropped_series(self, series: int) -> None:
        """Add what `max_series` left out of an export."""
        self._totals = replace(self._totals, series_dropped=self._totals.series_dropped + series)

    def commit(self) -> None:
        """Write the account to the ledger, if it has changed; a full directory is only logged."""
        if not self._uncommitted:
            return
        totals, histograms = self._account.counters.dump()
        closed = self._exchange.closed
        ledger = Ledger(
            launches=tuple(sorted(self._launches)),
            newest_unix_ns=self._newest_unix_ns,
            session=self._exchange.session,
            retired_sessions=tuple(sorted(self._exchange.retired_sessions)),
            closed_sequence=closed[0],
            closed_layers_sequence=closed[1],
            counted_sequence=self._counted_sequence,
            progress=self._account.progress,
            norms=self._account.norms.buckets,
            totals=totals,
            governor=self._governor.state,
            histograms=histograms,
            assumed=dict(self._exchange.assumed),
            conditions=self.conditions.memory,
            agent=replace(
                self._totals,
                records_dropped=self._totals.records_dropped
                + self._attempt.lost_here
                + self._exchange.lost,
            ),
        )
        try:
            write_ledger(locations.ledger_path(self.run_dir), ledger)
        except (OSError, ValueError) as error:
            log.warning("ledger of run %s cannot be written: %s", self.name, error)
        else:
            self._exchange.committed(closed)
        self._uncommitted = False

    def anything_new(self) -> bool:
        """Return whether a ring has appeared that was not read yet."""
        return self._finder.anything_new()

    def remove_rings(self) -> None:
        """Delete the rings of the newest attempt: the run is over."""
        for source in self._attempt.sources.values():
            remove_ring(source.path)

    def close(self) -> None:
        """Let go of the rings."""
        self._attempt.close()

    def _admit(self, rings: Rings, now_seconds: float) -> None:
        """Add the rings of one launch to the attempt, or begin a new attempt with them."""
        identity = rings[0][1].identity
        launch = (identity.launch, identity.attempt)
        newest_unix_ns = max(reader.identity.created_unix_ns for _, reader in rings)
        if launch in self._launches or self._beside(rings):
            self._launches.add(launch)
        elif newest_unix_ns > self._newest_unix_ns or self._succeeds(rings):
            self._begin_attempt(launch, newest_unix_ns, now_seconds)
        else:
            _discard(rings)
            return
        self._newest_unix_ns = max(newest_unix_ns, self._newest_unix_ns)
        self._uncommitted = True
        after, layers_after = self._exchange.closed
        for path, reader in rings:
            self._attempt.add(RankSource(path, reader, after=after, layers_after=layers_after))

    def _beside(self, rings: Rings) -> bool:
        """Return whether these are further ranks of the attempt, under another launcher.

        So it is when several nodes of a run are one machine: ranks differ and both are alive. An
        elastic launcher ends all its ranks before it starts them under other numbers.
        """
        ranks = {reader.identity.rank for _, reader in rings}
        return (
            self._alive
            and self._attempt.end is EndReason.RUNNING
            and self.identity.world_size == rings[0][1].identity.world_size
            and ranks.isdisjoint(self._attempt.sources)
            and _any_alive(rings)
        )

    def _succeeds(self, rings: Rings) -> bool:
        """Return whether these are the next attempt although they look older.

        So it is when the host's clock was set back in between.
        """
        return self.seen and not self._alive and _any_alive(rings)

    @property
    def _alive(self) -> bool:
        """Whether a rank of the attempt lives at this very moment, not only at the last look."""
        return any(source.alive for source in self._attempt.sources.values())

    def _begin_attempt(self, launch: Launch, newest_unix_ns: int, now_seconds: float) -> None:
        """Settle the attempt that was, and start the account of the next; counters go on.

        The rings of the old one are deleted only once what they said is in the ledger.
        """
        old, sessions, url = self._attempt, self._exchange.sessions, self.url
        self._fold(self._exchange.poll(now_seconds))
        self._fold(self._exchange.close_all())
        self._totals = add_attempt(self._totals, self._exchange)
        self._account.begin_attempt()
        self.history.clear()
        self._attempt = Attempt(self._settings.merge_deadline_seconds)
        self._exchange = Exchange(
            self._attempt,
            self._settings,
            session=f"{launch[0]}-{launch[1]}-{newest_unix_ns}",
            retired_sessions=sessions,
        )
        self._exchange.url, self._counted_sequence = url, 0
        self._launches, self._newest_unix_ns = {launch}, newest_unix_ns
        self._judged, self._gone_since_seconds = {}, {}
        self._uncommitted = True
        self.commit()
        for source in old.sources.values():
            log.info("rank %d: attempt %d takes over", source.identity.rank, launch[1])
            source.close()
            remove_ring(source.path)

    def _fold(self, items: Iterable[Item]) -> None:
        for item in items:
            self._uncommitted = True
            if isinstance(item, LocalStep):
                self._fold_ranks(item)
            elif isinstance(item, MergedTable):
                judged = self._judged.get(item.sequence, frozenset())
                layers = item.layers.judged_of(judged)
                self._account.fold_layers(item.sequence, layers, step_judged=bool(judged))
            else:
                self._fold_step(item)

    def _fold_ranks(self, local: LocalStep) -> None:
        """Count what the ranks said, unless an agent before this one has."""
        if local.row.sequence > self._counted_sequence:
            self._counted_sequence = local.row.sequence
            for rank, values in local.ranks.items():
                self._account.fold_rank(rank, values)

    def _fold_step(self, step: MergedStep) -> None:
        self._account.fold_step(step)
        self.conditions.after_step(self._account.progress, self._now_seconds, self._present)
        self.history.add(step)
        judged = {name for name, other in step.optimizers.items() if other.judged}
        self._judged[step.sequence] = frozenset(judged | ({""} if step.gradients_judged else set()))
        if len(self._judged) > _JUDGEMENTS_KEPT:
            del self._judged[next(iter(self._judged))]

    def _present(self) -> RunExport:
        return self.export(self._now_seconds, time.time())

    def _faded_ranks(self, now_seconds: float) -> frozenset[int]:
        return frozenset(
            rank
            for rank, since_seconds in self._gone_since_seconds.items()
            if now_seconds - since_seconds >= self._settings.linger_seconds
        )


def _any_alive(rings: Rings) -> bool:
    return any(reader.writer_alive() for _, reader in rings)


def _discard(rings: Rings) -> None:
    """Let go of the rings of a launch that was over before; delete them unless they are in use."""
    for path, reader in rings:
        if not reader.writer_alive():
            remove_ring(path)
        reader.close()
