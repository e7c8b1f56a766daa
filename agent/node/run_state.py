"""What a run holds from step to step, and how it goes from one node agent to the next.

What the rings say can be read again; all else is in the ledger.
"""

import logging
from dataclasses import replace
from pathlib import Path

from mp_agent.alerting.site import usable_values
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.account.accumulate import Accumulator
from mp_agent.node.account.counters import CounterBook
from mp_agent.node.account.window import ValueWindow
from mp_agent.node.attempt import Attempt
from mp_agent.node.conditions import ConditionTracker
from mp_agent.node.exchange import Exchange
from mp_agent.node.fading import Fading
from mp_agent.node.governor import LayerGovernor
from mp_agent.node.intake import Intake
from mp_agent.node.launches import Launches, Rings, launch_of
from mp_agent.node.ledger import Ledger, ProbeTotals, read_ledger, write_ledger
from mp_agent.ring import locations
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")


class RunState:
    """The account of a run and its present attempt."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        """Take up what an earlier node agent committed."""
        self._settings = settings
        self._path = locations.ledger_path(run_dir)
        values, self.ignored_settings = usable_values(settings, time_scale=settings.time_scale)
        ledger = read_ledger(self._path)
        self.launches = Launches(set(ledger.launches), ledger.newest_unix_ns)
        account = Accumulator(
            resolve(settings.thresholds),
            progress=ledger.progress,
            counters=CounterBook(ledger.totals, ledger.histograms),
            norms=ValueWindow(settings.window_seconds, ledger.norms),
        )
        self.intake = Intake(account, counted_sequence=ledger.counted_sequence)
        self.conditions = ConditionTracker(
            run_dir,
            values,
            memory=ledger.conditions,
            earlier=account.counters if ledger.launches else None,
        )
        """What the run suffers from, by the agent's own judgement; only at the root."""
        self.exchange = Exchange(
            Attempt(
                settings.merge_deadline_seconds,
                closed_sequence=ledger.closed_sequence,
                closed_layers_sequence=ledger.closed_layers_sequence,
            ),
            settings,
            session=ledger.session,
            assumed=ledger.assumed,
            retired_sessions=ledger.retired_sessions,
        )
        self.governor = LayerGovernor(ledger.governor)
        self.fading = Fading(settings.linger_seconds)
        self.uncommitted = False
        """Whether anything has changed that belongs in the ledger."""
        self._ended = ledger.agent
        """Totals of the attempts that ended."""

    @property
    def account(self) -> Accumulator:
        """What the closed steps add up to."""
        return self.intake.account

    @property
    def attempt(self) -> Attempt:
        """The present attempt, as this node's ranks show it."""
        return self.exchange.attempt

    @property
    def totals(self) -> ProbeTotals:
        """What probes counted and what was lost, in the present attempt too."""
        states = [source.state for source in self.attempt.sources.values()]
        ended = self._ended
        return ProbeTotals(
            probe_seconds=ended.probe_seconds + sum(state.probe_seconds for state in states),
            probe_errors=ended.probe_errors + sum(state.probe_errors for state in states),
            setting_errors=ended.setting_errors + sum(state.setting_errors for state in states),
            records_dropped=ended.records_dropped
            + sum(state.records_dropped for state in states)
            + self._lost,
            series_dropped=ended.series_dropped,
        )

    def count_dropped_series(self, series: int) -> None:
        """Add what `max_series` left out of an export."""
        self._ended = replace(self._ended, series_dropped=self._ended.series_dropped + series)

    def begin_attempt(self, rings: Rings) -> None:
        """Begin the next attempt, which made the rings; counters go on.

        The one before must be settled: what it still yields is lost.
        """
        before = self.exchange
        self._ended = self.totals
        self.launches.begin_attempt(rings)
        self.intake.begin_attempt()
        launcher, number = launch_of(rings)
        self.exchange = Exchange(
            Attempt(self._settings.merge_deadline_seconds),
            self._settings,
            session=f"{launcher}-{number}-{self.launches.newest_unix_ns}",
            retired_sessions=before.sessions,
        )
        self.exchange.url = before.url
        self.fading.begin_attempt()
        self.uncommitted = True

    def commit(self) -> None:
        """Write the ledger, if it would say anything new; a full directory is only logged."""
        if not self.uncommitted:
            return
        ledger = self._ledger()
        try:
            write_ledger(self._path, ledger)
        except (OSError, ValueError) as error:
            log.warning("ledger %s cannot be written: %s", self._path, error)
        else:
            self.exchange.committed((ledger.closed_sequence, ledger.closed_layers_sequence))
        self.uncommitted = False

    def _ledger(self) -> Ledger:
        """Return what a later node agent needs to go on from here."""
        account, exchange = self.account, self.exchange
        totals, histograms = account.counters.dump()
        closed_sequence, closed_layers_sequence = exchange.closed
        return Ledger(
            launches=tuple(sorted(self.launches.known)),
            newest_unix_ns=self.launches.newest_unix_ns,
            session=exchange.session,
            retired_sessions=tuple(sorted(exchange.retired_sessions)),
            closed_sequence=closed_sequence,
            closed_layers_sequence=closed_layers_sequence,
            counted_sequence=self.intake.counted_sequence,
            progress=account.progress,
            norms=account.norms.buckets,
            totals=totals,
            histograms=histograms,
            governor=self.governor.state,
            assumed=dict(exchange.assumed),
            # What this attempt's probes counted is still in their rings.
            agent=replace(self._ended, records_dropped=self._ended.records_dropped + self._lost),
            conditions=self.conditions.memory,
        )

    @property
    def _lost(self) -> int:
        """What this node agent lost of the present attempt."""
        return self.attempt.lost_here + self.exchange.lost
