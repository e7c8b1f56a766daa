"""One run on this node: its attempts, one after the other, in one account."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accumulate import Accumulator
from mp_agent.node.attempt import Attempt, ClosedLayers, ClosedStep
from mp_agent.node.counters import CounterBook
from mp_agent.node.finder import RingFinder, remove_ring, rings_by_launch
from mp_agent.node.ledger import Launch, Ledger, read_ledger, write_ledger
from mp_agent.node.snapshot_builder import RunExport
from mp_agent.node.source import RankSource
from mp_agent.node.views import add_attempt, agent_view, rank_view, run_view
from mp_agent.node.window import ValueWindow
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
        self._setting_errors = setting_errors
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
        self._attempt = Attempt(
            settings.merge_deadline_seconds,
            closed_sequence=ledger.closed_sequence,
            closed_layers_sequence=ledger.closed_layers_sequence,
            assumed=ledger.assumed,
        )
        self._finder = RingFinder(run_dir)
        self._judged: dict[int, bool] = {}
        self._gone_since_seconds: dict[int, float] = {}
        self._uncommitted = False

    @property
    def seen(self) -> bool:
        """Whether any rank of the run has shown itself."""
        return bool(self._attempt.sources)

    @property
    def end(self) -> EndReason:
        """How the newest attempt ended; RUNNING while it goes on."""
        return self._attempt.end

    @property
    def name(self) -> str:
        """Name of the run; of its directory while no rank is known."""
        return self._attempt.identity.run if self.seen else self.run_dir.name

    def poll(self, now_seconds: float) -> None:
        """Read what is new in the rings, merge it and fold it in."""
        for rings in rings_by_launch(self._finder.new_rings()):
            self._admit(rings, now_seconds)
        self._fold(self._attempt.poll(now_seconds))
        if self.end is not EndReason.RUNNING:
            self._fold(self._attempt.close_all())
        for rank, source in self._attempt.sources.items():
            if source.end is EndReason.RUNNING:
                self._gone_since_seconds.pop(rank, None)
            else:
                self._gone_since_seconds.setdefault(rank, now_seconds)

    def export(
        self,
        now_seconds: float,
        time_unix_seconds: float,
        *,
        scrape_duration_seconds: float | None = None,
    ) -> RunExport:
        """Return all views of the run. Only once a rank was `seen`."""
        attempt, account = self._attempt, self._account
        totals = add_attempt(self._totals, attempt)
        holds_root = 0 in attempt.sources
        return RunExport(
            run=self.name,
            node_rank=attempt.identity.node_rank,
            view=run_view(attempt, account, time_unix_seconds) if holds_root else None,
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
        )

    def count_dropped_series(self, series: int) -> None:
        """Add what `max_series` left out of an export."""
        self._totals = replace(self._totals, series_dropped=self._totals.series_dropped + series)

    def commit(self) -> None:
        """Write the account to the ledger, if it has changed; a full directory is only logged."""
        if not self._uncommitted:
            return
        totals, histograms = self._account.counters.dump()
        ledger = Ledger(
            launches=tuple(sorted(self._launches)),
            newest_unix_ns=self._newest_unix_ns,
            closed_sequence=self._attempt.steps.closed_sequence,
            closed_layers_sequence=self._attempt.tables.closed_sequence,
            progress=self._account.progress,
            norms=self._account.norms.buckets,
            totals=totals,
            histograms=histograms,
            assumed=self._attempt.assumed.verdicts,
            agent=replace(
                self._totals,
                records_dropped=self._totals.records_dropped + self._attempt.lost_here,
            ),
        )
        try:
            write_ledger(locations.ledger_path(self.run_dir), ledger)
        except (OSError, ValueError) as error:
            log.warning("ledger of run %s cannot be written: %s", self.name, error)
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
        elif newest_unix_ns > self._newest_unix_ns:
            self._begin_attempt(launch, newest_unix_ns, now_seconds)
        else:
            _discard(rings)
            return
        self._newest_unix_ns = max(newest_unix_ns, self._newest_unix_ns)
        self._uncommitted = True
        after = self._attempt.steps.closed_sequence
        layers_after = self._attempt.tables.closed_sequence
        for path, reader in rings:
            self._attempt.add(RankSource(path, reader, after=after, layers_after=layers_after))

    def _beside(self, rings: Rings) -> bool:
        """Return whether these are further ranks of the attempt, under another launcher.

        So it is when several nodes of a run are one machine: ranks differ and both are alive.
        """
        ranks = {reader.identity.rank for _, reader in rings}
        return (
            self.seen
            and self.end is EndReason.RUNNING
            and ranks.isdisjoint(self._attempt.sources)
            and any(reader.writer_alive() for _, reader in rings)
        )

    def _begin_attempt(self, launch: Launch, newest_unix_ns: int, now_seconds: float) -> None:
        """Settle the attempt that was, and start the account of the next; counters go on.

        The rings of the old one are deleted only once what they said is in the ledger.
        """
        old = self._attempt
        self._fold(old.poll(now_seconds))
        self._fold(old.close_all())
        self._totals = add_attempt(self._totals, old)
        self._account.begin_attempt()
        self._attempt = Attempt(self._settings.merge_deadline_seconds)
        self._launches, self._newest_unix_ns = {launch}, newest_unix_ns
        self._judged, self._gone_since_seconds = {}, {}
        self._uncommitted = True
        self.commit()
        for source in old.sources.values():
            log.info("rank %d: attempt %d takes over", source.identity.rank, launch[1])
            source.close()
            remove_ring(source.path)

    def _fold(self, closed: Iterable[ClosedStep | ClosedLayers]) -> None:
        for item in closed:
            self._uncommitted = True
            if isinstance(item, ClosedStep):
                self._fold_step(item)
            else:
                judged = self._judged.get(item.sequence, False)
                self._account.fold_layers(item.sequence, item.layers, step_judged=judged)

    def _fold_step(self, closed: ClosedStep) -> None:
        step = closed.step
        self._account.fold_step(step)
        for rank, values in closed.ranks.items():
            self._account.fold_rank(rank, values)
        self._judged[step.sequence] = step.gradients_judged
        if len(self._judged) > _JUDGEMENTS_KEPT:
            del self._judged[next(iter(self._judged))]

    def _faded_ranks(self, now_seconds: float) -> frozenset[int]:
        return frozenset(
            rank
            for rank, since_seconds in self._gone_since_seconds.items()
            if now_seconds - since_seconds >= self._settings.linger_seconds
        )


def _discard(rings: Rings) -> None:
    """Let go of the rings of a launch that was over before; delete them unless they are in use."""
    for path, reader in rings:
        if not reader.writer_alive():
            remove_ring(path)
        reader.close()
