"""Decides when a flight record is written, and writes it.

Request and answer files with which `mp-agent dump` gets a flight record from a node agent.
::

    <run directory>/flight-request.json    written by the command, removed by the node agent
    <run directory>/flight-answer.json     written by the node agent, removed by the command
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from mp_agent.errors import FlightError, RingError
from mp_agent.flight.record.store import record_name
from mp_agent.node.flight.job import FlightJob
from mp_agent.node.run.run import Run
from mp_agent.records.conditions import ActiveCondition, StoredConditionEvent
from mp_agent.records.flight import FlightRequest
from mp_agent.records.steps import EndReason
from mp_agent.ring.files import read_private, replace_atomically
from mp_agent.settings import Settings

COOL_DOWN_SECONDS = 600.0
"""A condition that fires again within this time triggers no further record."""
GATHER_SECONDS = 30.0
"""After a record, further conditions are collected for this long and share the next one."""

_BAD_ENDS = (EndReason.FAILED, EndReason.KILLED, EndReason.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Trigger:
    """Why a record is due."""

    reason: str
    trigger: StoredConditionEvent | None = None


@dataclass(slots=True)
class FlightPolicy:
    """Decides when a record of one run is due, and remembers for what there was one."""

    _pending: dict[str, StoredConditionEvent] = field(default_factory=dict)
    _notified_seconds: dict[str, float] = field(default_factory=dict)
    _last_seconds: float | None = None
    _ended_session: str | None = None

    def on_condition(self, event: StoredConditionEvent) -> None:
        """Note a critical condition that has begun; others are ignored."""
        if event.state == "firing" and event.condition.severity == "critical":
            self._pending.setdefault(event.condition.name, event)

    def due(self, end: EndReason, session: str, now_seconds: float) -> Trigger | None:
        """Return why a record is due now, assuming that it gets written; None if none is due.

        end, session: how the current attempt ended, and its identifier.
        """
        if end in _BAD_ENDS and self._ended_session != session:
            self._ended_session = session
            trigger = next(iter(self._pending.values()), None)
            self._note(now_seconds)
            return Trigger(end.name.lower(), trigger)
        self._pending = {
            name: event
            for name, event in self._pending.items()
            if now_seconds - self._notified_seconds.get(name, -COOL_DOWN_SECONDS)
            >= COOL_DOWN_SECONDS
        }
        last_seconds = self._last_seconds
        gathering = last_seconds is not None and now_seconds - last_seconds < GATHER_SECONDS
        if not self._pending or gathering:
            return None
        first = next(iter(self._pending.values()))
        self._note(now_seconds)
        return Trigger(first.condition.name, first)

    def _note(self, now_seconds: float) -> None:
        self._notified_seconds.update(dict.fromkeys(self._pending, now_seconds))
        self._pending.clear()
        self._last_seconds = now_seconds


_BYTES_MAX = 1 << 14
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRequest:
    """A request for a flight record. `id` is unique per request."""

    id: str
    requested_unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpAnswer:
    """The path of the record, or why there is none."""

    id: str
    path: str = ""
    problem: str = ""


def write_request(run_dir: Path, request: DumpRequest) -> None:
    """Send a request to the run's node agent. Raises OSError."""
    replace_atomically(_request_path(run_dir), msgspec.json.encode(request))


def pop_request(run_dir: Path) -> DumpRequest | None:
    """Return and remove the pending request; None if there is none that can be read."""
    path = _request_path(run_dir)
    if not path.exists():
        return None
    request = _read(path, DumpRequest)
    path.unlink(missing_ok=True)
    return request


def write_answer(run_dir: Path, answer: DumpAnswer) -> None:
    """Answer a request. Raises OSError."""
    replace_atomically(_answer_path(run_dir), msgspec.json.encode(answer))


def pop_answer(run_dir: Path, request: DumpRequest) -> DumpAnswer | None:
    """Return and remove the answer to a request; None while there is none."""
    path = _answer_path(run_dir)
    answer = _read(path, DumpAnswer)
    if answer is None or answer.id != request.id:
        return None
    path.unlink(missing_ok=True)
    return answer


def forget_requests(run_dir: Path) -> None:
    """Remove both files: the run is over. Raises OSError."""
    _request_path(run_dir).unlink(missing_ok=True)
    _answer_path(run_dir).unlink(missing_ok=True)


def _request_path(run_dir: Path) -> Path:
    return run_dir / "flight-request.json"


def _answer_path(run_dir: Path) -> Path:
    return run_dir / "flight-answer.json"


def _read(path: Path, kind: type[_T]) -> _T | None:
    content = read_private(path, _BYTES_MAX)
    try:
        return None if content is None else msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, ValueError):
        return None


log = logging.getLogger("mp_agent.node")

_QUEUE_MAX = 8
_NANOSECONDS = 1e9

Done = Callable[[Path | None, str], None]
"""Called with the file that was written, or with the problem."""


@dataclass(frozen=True, slots=True)
class WrittenRecord:
    """A record that a condition or the end of a run made due, once it is written."""

    run: Run
    path: Path | None
    """The file; None if it cannot be written."""
    problem: str = ""


class FlightWriter:
    """A daemon thread that starts with the first record."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._jobs: queue.Queue[tuple[FlightJob, str, Done]] = queue.Queue(_QUEUE_MAX)
        self._results: queue.SimpleQueue[tuple[Path, bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.pending = 0
        """Submitted records whose results were not popped yet."""

    def submit(self, job: FlightJob, run: str, done: Done) -> bool:
        """Queue a job; return False if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="flight", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((job, run, done))
        except queue.Full:
            return False
        self.pending += 1
        return True

    def pop_results(self) -> list[tuple[Path, bool]]:
        """Return and remove the finished jobs: run directory, and whether it was written."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        self.pending -= len(results)
        return results

    def _work(self) -> None:
        while True:
            job, run, done = self._jobs.get()
            written = self._write(job, run, done)
            self._results.put((job.run_dir, written))

    def _write(self, job: FlightJob, run: str, done: Done) -> bool:
        started = time.monotonic()
        try:
            path = job.write(self._settings)
        except (OSError, RingError, FlightError) as error:
            log.error("flight record of run %s cannot be written: %s", run, error)
            done(None, str(error))
            return False
        except Exception as error:
            log.exception("flight record of run %s cannot be written", run)
            done(None, repr(error))
            return False
        seconds = time.monotonic() - started
        log.info("run %s: flight record %s (%s, %.2f s)", run, path, job.request.reason, seconds)
        done(path, "")
        return True


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
        self._recorded: queue.SimpleQueue[WrittenRecord] = queue.SimpleQueue()

    def pop_recorded(self) -> Iterator[WrittenRecord]:
        """Yield, and forget, the records that were written of runs whose root is here."""
        while not self._recorded.empty():
            yield self._recorded.get()

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

        def done(path: Path | None, problem: str) -> None:
            if run.is_root:
                self._recorded.put(WrittenRecord(run, path, problem))

        self._submit(run, state, request, now_seconds, done=done)

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
            conditions=_conditions_of(run),
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


def _conditions_of(run: Run) -> tuple[ActiveCondition, ...]:
    """Return the conditions that the attempt has, and those that it had."""
    active = run.conditions.active
    began_seconds = min(run.created_unix_ns, default=0) / _NANOSECONDS
    held = {(one.name, one.severity) for one in active}
    past = (one for one in run.conditions.past if (one.name, one.severity) not in held)
    return (*active, *(one for one in past if one.since_unix_seconds >= began_seconds))


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
