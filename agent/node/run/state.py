"""What is known of a run: its ranks, the steps that it has taken in, and its account.

State of a run between steps, and its handover to a successor of the node agent.
What is in the rings can be read again; everything else is in the ledger.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mp_agent.alerting.site import usable_values
from mp_agent.errors import BaselineError
from mp_agent.exporters.status_page.report import StepHistory
from mp_agent.node.accounting.accumulator import Accumulator, CounterStore
from mp_agent.node.accounting.ranks import Standstill
from mp_agent.node.cluster.member import ClusterMember
from mp_agent.node.cluster.root import MergedTable
from mp_agent.node.collect.attempt import LocalAttempt, LocalStep
from mp_agent.node.collect.rank_source import RankSource
from mp_agent.node.conditions.tracker import ConditionTracker
from mp_agent.node.run.launches import Launches, NameConflicts, Rings, launch_of, made_unix_ns
from mp_agent.node.run.ledger import Ledger, ProbeTotals, read_ledger, write_ledger
from mp_agent.node.series.layer_budget import LayerBudget
from mp_agent.records.baseline import Baseline, read_baseline
from mp_agent.records.columns import FAMILIES, ColumnFamily
from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import EndReason
from mp_agent.records.tensor_collections import TensorCollection
from mp_agent.records.views import ScriptFindings
from mp_agent.ring import locations
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

GRACE_SECONDS = 30.0
"""Time after the other ranks' first steps within which a rank may still appear."""


@dataclass(slots=True)
class DepartedRanks:
    """Tracks when the ranks of an attempt ended, so that their last values expire."""

    linger_seconds: float
    _ended_seconds: dict[int, float] = field(default_factory=dict)

    def update(self, sources: Mapping[int, RankSource], now_seconds: float) -> None:
        """Note which ranks have ended by now."""
        for rank, source in sources.items():
            if source.end is not EndReason.RUNNING:
                self._ended_seconds.setdefault(rank, now_seconds)

    def begin_attempt(self) -> None:
        """Forget all ranks: the next attempt reuses their numbers."""
        self._ended_seconds.clear()

    def expired(self, now_seconds: float) -> frozenset[int]:
        """Return the ranks that ended at least `linger_seconds` ago."""
        return frozenset(
            rank
            for rank, ended_seconds in self._ended_seconds.items()
            if now_seconds - ended_seconds >= self.linger_seconds
        )


class UnwatchedRanks:
    """Warns, once per set of ranks, of ranks without a ring while others make steps."""

    def __init__(self) -> None:
        self._since_seconds: float | None = None
        self._reported: frozenset[int] = frozenset()

    def check(self, run: str, attempt: LocalAttempt, now_seconds: float) -> None:
        """Compare the ranks that belong to this node with those that have a ring."""
        missing = frozenset(attempt.expected_ranks - set(attempt.sources))
        if not missing or missing == self._reported or not attempt.newest_sequence:
            self._since_seconds = None
            return
        if self._since_seconds is None:
            self._since_seconds = now_seconds
        if now_seconds - self._since_seconds >= GRACE_SECONDS:
            self._reported = missing
            log.warning(
                "run %s: not watched on this node: rank %s. Set MP_AGENT_ATTACH=1 for the job, or "
                "call mp_agent.init() in every rank",
                run,
                ", ".join(map(str, sorted(missing))),
            )


_STEPS_KEPT = 4096
_SESSIONS_KEPT = 1024
"""Of earlier attempts, so that no report of theirs counts that was long on its way."""


@dataclass(frozen=True, slots=True)
class _ClosedStep:
    step: int
    """The step in the trainer's own count."""
    judged: Mapping[str, frozenset[str]]
    """Optimizers whose norms counted, by family."""


class StepIngest:
    """The only writer of a run's account and its history."""

    def __init__(self, account: Accumulator, *, counted_sequence: int = 0) -> None:
        """counted_sequence: step up to which an earlier agent has counted this node's ranks."""
        self.account = account
        self.history = StepHistory()
        """The last steps, for the status page."""
        self.counted_sequence = counted_sequence
        """Steps up to this one are in the counters of this node's ranks."""
        self._closed: dict[int, _ClosedStep] = {}
        """Closed steps by sequence number, for the layers that follow."""

    def begin_attempt(self) -> None:
        """Count the next attempt's steps from its first on; counters continue."""
        self.account.begin_attempt()
        self.history.clear()
        self.counted_sequence = 0
        self._closed = {}

    def fold_local(self, step: LocalStep) -> None:
        """Count what this node's ranks observed, unless an earlier node agent has."""
        if step.row.sequence > self.counted_sequence:
            self.counted_sequence = step.row.sequence
            for rank, values in step.ranks.items():
                self.account.fold_rank(rank, values)

    def fold_step(self, step: MergedStep) -> None:
        """Add a step of the run."""
        self.account.fold_step(step)
        self.history.add(step)
        self.history.loss_misread = self.account.progress.misreadings.scaled
        self._closed[step.sequence] = _ClosedStep(
            step.step,
            {
                family.name: _judged_optimizers(step, family)
                for family in FAMILIES
                if step.optimizers or family.name in step.families
            },
        )
        if len(self._closed) > _STEPS_KEPT:
            del self._closed[next(iter(self._closed))]

    def fold_layers(self, table: MergedTable, collections: Sequence[TensorCollection] = ()) -> None:
        """Add the layers of a sampled step; the step itself came before.

        collections: those that the script has defined.
        """
        closed = self._closed.get(table.sequence, _ClosedStep(table.sequence, {}))
        for name, layers in table.families.items():
            judged = closed.judged.get(name, frozenset())
            self.account.fold_layers(
                table.sequence,
                layers.judged_of(judged),
                step_judged=bool(judged),
                step=closed.step,
                collections=collections,
            )


def _judged_optimizers(step: MergedStep, family: ColumnFamily) -> frozenset[str]:
    """Return the optimizers whose rows of a family count; "" stands for the run's own."""
    whole = step.counts(family)
    judged = {
        name
        for name, own in step.optimizers.items()
        if (whole if own.joint else own.counts(family))
    }
    return frozenset(judged | ({""} if whole else set()))


def _baseline(path: Path | None) -> tuple[Baseline | None, bool]:
    """Return the baseline in a file, and whether there is a file that cannot be used.

    The training goes on without: that is logged, counted, and named among what is not supported.
    """
    try:
        return (None if path is None else read_baseline(path)), False
    except BaselineError as error:
        log.warning("baseline has value %s", error)
        return None, True


class RunState:
    """The account of a run and its current attempt."""

    def __init__(self, run_dir: Path, settings: Settings) -> None:
        """Continue from what an earlier node agent committed."""
        self._settings = settings
        self._path = locations.ledger_path(run_dir)
        # Logged for the agent as a whole, whatever number of runs it has.
        values, self.ignored_settings = usable_values(
            settings, time_scale=settings.time_scale, logged=False
        )
        ledger = read_ledger(self._path)
        self.launches = Launches(set(ledger.launches), ledger.newest_unix_ns, ledger.read_launches)
        self.thresholds = values.limits
        baseline, self.unread_baseline = _baseline(settings.baseline)
        self.ignored_settings += self.unread_baseline
        account = Accumulator(
            self.thresholds,
            progress=ledger.progress,
            counters=CounterStore(ledger.totals, ledger.histograms),
            window_seconds=settings.window_seconds,
            baseline=baseline,
        )
        self.step_ingest = StepIngest(account, counted_sequence=ledger.counted_sequence)
        self.conditions = ConditionTracker(
            run_dir,
            values,
            memory=ledger.conditions,
            earlier=account.counters if ledger.launches else None,
        )
        """The conditions judged by this agent; only at the root."""
        self.member = ClusterMember(
            LocalAttempt(
                settings.merge_deadline_seconds,
                closed_sequence=ledger.closed_sequence,
                closed_layers_sequence=ledger.closed_layers_sequence,
            ),
            settings,
            session=ledger.session,
            assumed=ledger.assumed,
            retired_sessions=ledger.retired_sessions,
        )
        self.layer_budget = LayerBudget(ledger.layer_budget)
        self.departed_ranks = DepartedRanks(settings.linger_seconds)
        self.standstill = Standstill()
        self.script_findings: ScriptFindings | None = None
        """Findings in the main script, if it was checked."""
        self.begun_unix_ns = ledger.begun_unix_ns
        """When the counters started from 0; 0: not known."""
        self.attempts = ledger.attempts
        """How often the run was started on this node."""
        self._counts_from_0 = not ledger.launches
        self.counted_conflicts = ledger.conflicts
        """What an earlier agent has counted as lost: see `Ledger.conflicts`."""
        self.name_conflicts = NameConflicts()
        """Jobs of the same name that train at the same time."""
        self.uncommitted = False
        """Whether the ledger is out of date."""
        self._pace_seconds = settings.push_interval_seconds
        self._refusal = ""
        """Why the last write of the ledger failed."""
        self._ended = ledger.agent
        """Totals of the attempts that ended."""

    @property
    def account(self) -> Accumulator:
        """Counters and derived state of the run."""
        return self.step_ingest.account

    @property
    def attempt(self) -> LocalAttempt:
        """The current attempt on this node."""
        return self.member.attempt

    @property
    def totals(self) -> ProbeTotals:
        """Counts of the probes and of lost records, including the current attempt."""
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

    def follow_pace(self, pace_seconds: float) -> None:
        """Wait for rows of nodes that push this often."""
        self._pace_seconds = pace_seconds
        self.member.follow_pace(pace_seconds)

    def standing_seconds(self, now_seconds: float) -> float | None:
        """Return the time since the last progress, less what rows may take since pushes are slow.

        None before the first update.
        """
        found = self.standstill.seconds(now_seconds)
        return None if found is None else max(found - self.member.slower_seconds, 0.0)

    def count_dropped_series(self, series: int) -> None:
        """Count series that `max_series` left out of an export."""
        self._ended = replace(self._ended, series_dropped=self._ended.series_dropped + series)

    def update_standstill(self, now_seconds: float) -> None:
        """Update the time since the run last made progress."""
        last = self.account.progress.last
        sequence = last.sequence if last else 0
        self.standstill.update(self.member.session, sequence, self.member.phase_name, now_seconds)

    def count_lost(self, records: int) -> None:
        """Count records that will never be read."""
        lost = self._ended.records_dropped + records
        self._ended = replace(self._ended, records_dropped=lost)
        self.uncommitted = True

    def begin_attempt(self, rings: Rings) -> None:
        """Start the next attempt, to which the rings belong; counters continue.

        The previous one must be finished: rows that it still holds are lost.
        """
        if self._counts_from_0:
            self.begun_unix_ns, self._counts_from_0 = made_unix_ns(rings), False
        self.attempts += 1
        before = self.member
        self._ended = self.totals
        self.name_conflicts.lost = 0
        self.launches.begin_attempt(rings)
        self.step_ingest.begin_attempt()
        launcher, number = launch_of(rings)
        kept = max(_SESSIONS_KEPT, len(before.sessions))
        self.member = ClusterMember(
            LocalAttempt(self._settings.merge_deadline_seconds),
            self._settings,
            session=f"{launcher}-{number}-{self.launches.newest_unix_ns}",
            retired_sessions=(*before.retired_sessions, *sorted(before.sessions))[-kept:],
        )
        self.member.url = before.url
        self.member.follow_pace(self._pace_seconds)
        self.departed_ranks.begin_attempt()
        self.uncommitted = True

    def commit(self) -> bool:
        """Write the ledger if it is out of date; return whether it is up to date.

        A failure is logged once, and retried at the next commit.
        """
        if not self.uncommitted:
            return True
        ledger = self._ledger()
        try:
            write_ledger(self._path, ledger)
        except (OSError, ValueError) as error:
            if str(error) != self._refusal:
                self._refusal = str(error)
                log.warning("ledger %s cannot be written: %s", self._path, error)
            return False
        if self._refusal:
            self._refusal = ""
            log.info("ledger %s can be written again", self._path)
        self.member.committed((ledger.closed_sequence, ledger.closed_layers_sequence))
        self.uncommitted = False
        return True

    def _ledger(self) -> Ledger:
        """Return the state that a successor of this node agent needs."""
        account, member = self.account, self.member
        totals, histograms = account.counters.dump()
        closed_sequence, closed_layers_sequence = member.closed
        return Ledger(
            launches=tuple(sorted(self.launches.known)),
            newest_unix_ns=self.launches.newest_unix_ns,
            begun_unix_ns=self.begun_unix_ns,
            attempts=self.attempts,
            read_launches=self.launches.read,
            session=member.session,
            retired_sessions=member.retired_sessions,
            closed_sequence=closed_sequence,
            closed_layers_sequence=closed_layers_sequence,
            counted_sequence=self.step_ingest.counted_sequence,
            progress=account.progress,
            totals=totals,
            histograms=histograms,
            layer_budget=self.layer_budget.state,
            assumed=dict(member.assumed),
            conflicts=self.name_conflicts.counted,
            # The counts of this attempt's probes are still in their rings.
            agent=replace(self._ended, records_dropped=self._ended.records_dropped + self._lost),
            conditions=self.conditions.memory,
        )

    @property
    def _lost(self) -> int:
        """Records that this node agent lost in the current attempt."""
        lost = self.attempt.lost_here + self.member.lost + self.account.lost
        return lost + self.name_conflicts.lost
