"""Writes flight records of running jobs: decides when, and of which steps."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from mp_agent.flight.record.store import record_name
from mp_agent.node.flight.job import FlightJob
from mp_agent.node.flight.policy import FlightPolicy, Trigger
from mp_agent.node.flight.requests import DumpAnswer, DumpRequest, pop_request, write_answer
from mp_agent.node.flight.writer import Done, FlightWriter
from mp_agent.node.run.run import Run
from mp_agent.records.conditions import ActiveCondition, StoredConditionEvent
from mp_agent.records.flight import FlightRequest
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

BUSY_SECONDS_MAX = 60.0
"""Longest time for which an unresponsive disk delays the release of a run."""
_STOP_POLL_SECONDS = 0.02


@dataclass(slots=True)
class _RunFlight:
    policy: FlightPolicy = field(default_factory=FlightPolicy)
    session: str = ""
    followed: str = ""
    """Name of the root's last request that this node has handled."""
    queued_seconds: list[float] = field(default_factory=list)
    written: int = 0
    failed: int = 0


class FlightService:
    """A service of the node agent, for all its runs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._enabled = settings.flight_records_max > 0
        self._runs: dict[Path, _RunFlight] = {}
        self._writer = FlightWriter(settings)

    def counts(self, run: Run) -> tuple[int, int]:
        """Return how many flight records of a run were written, and how many failed."""
        state = self._runs.get(run.run_dir)
        return (0, 0) if state is None else (state.written, state.failed)

    def poll(self, run: Run, now_seconds: float) -> None:
        """Start records that are due for a run; called after each poll, never blocks."""
        self._settle()
        if not run.seen:
            return
        state = self._state_of(run)
        if state.session != run.session:
            state.session = run.session
            if run.is_root:
                run.flight_request = None
        if asked := pop_request(run.run_dir):
            self._dump(run, state, asked, now_seconds)
        if not self._enabled:
            return
        self._follow_root(run, state, now_seconds)
        if trigger := state.policy.due(run.attempt.end, run.session, now_seconds):
            self._record(run, state, trigger, now_seconds)

    def busy(self, run: Run, now_seconds: float) -> bool:
        """Return whether a record of the run is being written; False after `BUSY_SECONDS_MAX`."""
        self._settle()
        state = self._runs.get(run.run_dir)
        return state is not None and any(
            now_seconds - queued < BUSY_SECONDS_MAX for queued in state.queued_seconds
        )

    def forget(self, run: Run) -> None:
        """Drop the state of a run that is over."""
        self._runs.pop(run.run_dir, None)

    def start(self) -> None:
        """Do nothing: the thread starts with the first record."""

    def tick(self, now_seconds: float) -> None:
        """Count the records that were written."""
        self._settle()

    async def stop(self, deadline_seconds: float) -> None:
        """Wait until all requested records are written, at most until the deadline."""
        while self._writer.pending and time.monotonic() < deadline_seconds:
            await asyncio.sleep(_STOP_POLL_SECONDS)
        self._settle()

    def _state_of(self, run: Run) -> _RunFlight:
        """Return the state of a run; the first call subscribes to its conditions."""
        state = self._runs.get(run.run_dir)
        if state is None:
            state = self._runs[run.run_dir] = _RunFlight()
            run.conditions.listeners.append(state.policy.on_condition)
            for condition in run.conditions.active:
                state.policy.on_condition(_begun(condition))
        return state

    def _follow_root(self, run: Run, state: _RunFlight, now_seconds: float) -> None:
        """Write the steps that the root requested of this node."""
        request = run.flight_request
        if run.is_root or request is None or request.name == state.followed:
            return
        state.followed = request.name
        self._submit(run, state, request, now_seconds, done=_ignore_result)

    def _record(self, run: Run, state: _RunFlight, trigger: Trigger, now_seconds: float) -> None:
        request = self._make_request(run, trigger)
        # Every node notices the end of its own ranks by itself.
        if run.is_root and trigger.trigger is not None:
            run.flight_request = request
        self._submit(run, state, request, now_seconds, done=_ignore_result)

    def _dump(self, run: Run, state: _RunFlight, asked: DumpRequest, now_seconds: float) -> None:
        def done(path: Path | None, problem: str) -> None:
            answer = DumpAnswer(id=asked.id, path=str(path or ""), problem=problem)
            try:
                write_answer(run.run_dir, answer)
            except OSError as error:
                log.warning("a request for a flight record cannot be answered: %s", error.strerror)

        if not self._enabled:
            done(None, "flight records are disabled: flight_records_max is 0")
            return
        request = self._make_request(run, Trigger("request"))
        if run.is_root:
            run.flight_request = request
        self._submit(run, state, request, now_seconds, done=done)

    def _make_request(self, run: Run, trigger: Trigger) -> FlightRequest:
        now_unix_seconds = time.time()
        last = run.attempt.newest_sequence
        return FlightRequest(
            name=record_name(now_unix_seconds, trigger.reason),
            reason=trigger.reason,
            first=last - self._settings.flight_steps + 1,
            last=last,
            requested_unix_seconds=now_unix_seconds,
            trigger=trigger.trigger,
        )

    def _submit(
        self, run: Run, state: _RunFlight, request: FlightRequest, now_seconds: float, *, done: Done
    ) -> None:
        job = FlightJob(
            request=request,
            run_dir=run.run_dir,
            conditions=run.conditions.active,
            tables=run.attempt.layer_tables.tables,
        )
        state.queued_seconds.append(now_seconds)
        if not self._writer.submit(job, run.name, done):
            state.queued_seconds.pop()
            state.failed += 1
            log.warning("run %s: too many flight records at once; one is skipped", run.name)
            done(None, "too many flight records at once")

    def _settle(self) -> None:
        for run_dir, written in self._writer.pop_results():
            state = self._runs.get(run_dir)
            if state is None:
                continue
            state.written += written
            state.failed += not written
            if state.queued_seconds:
                state.queued_seconds.pop(0)


def _begun(condition: ActiveCondition) -> StoredConditionEvent:
    """Return the event with which an active condition began."""
    return StoredConditionEvent(
        state="firing",
        condition=condition,
        step=condition.since_step,
        time_unix_seconds=condition.since_unix_seconds,
    )


def _ignore_result(path: Path | None, problem: str) -> None:
    """Do nothing with the result."""
