"""Has each flight record of a run in trouble analysed, and serves the newest post-mortem."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from mp_agent.catalog.metrics.run import POSTMORTEMS
from mp_agent.flight.record.store import REPORT_DOCUMENT, REPORT_PAGE, newest_report
from mp_agent.node.flight.service import FlightService, WrittenRecord
from mp_agent.node.run.child import Child, Ended, start_child
from mp_agent.node.run.run import Run
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

SECONDS_MAX = 600.0
"""The analysis runs at a low priority; its CPU time and memory have their own limits."""
OTHER_NODES_SECONDS = 10.0
"""Time for other nodes to write the same steps, where they share the directory."""
_COMMAND = ("-m", "mp_agent.node.commands.flight")
_STOP_POLL_SECONDS = 0.05
_FIRST_LINE_CHARACTERS_MAX = 1000
_DISABLED = "No post-mortem: flight records are disabled, since flight_records_max is 0."


@dataclass(frozen=True, slots=True)
class _Due:
    run: Run
    record: Path
    """Its directory."""
    not_before_seconds: float


class Postmortems:
    """A service of the node agent: analyses one record at a time, the newest of each run.

    Only at the root agent of a run, which judges its conditions. How often is limited by how often
    a condition makes a record due. What was found becomes part of the critical conditions.
    """

    def __init__(
        self, settings: Settings, flight: FlightService, runs: Callable[[], Iterable[Run]]
    ) -> None:
        self._directory = settings.flight_dir
        self._enabled = settings.flight_records_max > 0
        self._flight = flight
        self._runs = runs
        self._due: dict[Path, _Due] = {}
        self._current: tuple[_Due, Child] | None = None

    def start(self) -> None:
        """Do nothing: an analysis starts when there is a record."""

    def tick(self, now_seconds: float) -> None:
        """Take the result of the analysis that has ended, or start the next one."""
        for recorded in self._flight.pop_recorded():
            self._add(recorded, now_seconds)
        if not self._enabled:
            for run in self._runs():
                if run.seen and run.is_root:
                    run.conditions.explain(_DISABLED, now_seconds)
        if self._current is not None:
            self._poll(now_seconds)
        elif due := self._next(now_seconds):
            self._begin(due, now_seconds)

    async def stop(self, deadline_seconds: float) -> None:
        """Let the analysis that is under way end, until the deadline."""
        while self._current is not None and time.monotonic() < deadline_seconds:
            self._poll(time.monotonic())
            await asyncio.sleep(_STOP_POLL_SECONDS)
        if self._current is not None:
            self._current[1].close()
            self._current = None

    def routes(self) -> list[web.RouteDef]:
        """Return the route of the reports: `/postmortem/RUN`, and as JSON with `.json` after it."""
        return [web.get(f"{POSTMORTEMS}/{{run:.+}}", self._report)]

    def _add(self, recorded: WrittenRecord, now_seconds: float) -> None:
        run = recorded.run
        if recorded.path is None:
            text = f"No post-mortem: no flight record could be written: {recorded.problem}."
            run.conditions.explain(text, now_seconds)
            return
        wait_seconds = OTHER_NODES_SECONDS if len(run.nodes) > 1 else 0.0
        self._due[run.run_dir] = _Due(run, recorded.path.parent, now_seconds + wait_seconds)

    def _next(self, now_seconds: float) -> _Due | None:
        for run_dir, due in self._due.items():
            if now_seconds >= due.not_before_seconds:
                return self._due.pop(run_dir)
        return None

    def _begin(self, due: _Due, now_seconds: float) -> None:
        arguments = (*_COMMAND, str(due.record))
        child = start_child(arguments, seconds_max=SECONDS_MAX, now_seconds=now_seconds)
        if isinstance(child, Ended):
            _settle(due, child, now_seconds)
        else:
            self._current = due, child

    def _poll(self, now_seconds: float) -> None:
        assert self._current is not None
        due, child = self._current
        if (ended := child.poll(now_seconds)) is not None:
            self._current = None
            _settle(due, ended, now_seconds)

    async def _report(self, request: web.Request) -> web.Response:
        # In a thread: the directory may be on a slow file system.
        found = await asyncio.to_thread(self._read, request.match_info["run"])
        if found is None:
            raise web.HTTPNotFound(text=self._why_not(request.match_info["run"]))
        body, kind = found
        headers = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return web.Response(body=body, headers=headers)

    def _read(self, name: str) -> tuple[bytes, str] | None:
        run = name.removesuffix(".json")
        if run != name and (body := newest_report(self._directory, run, REPORT_DOCUMENT)):
            return body, "application/json"
        body = newest_report(self._directory, name, REPORT_PAGE)
        return None if body is None else (body, "text/html; charset=utf-8")

    def _why_not(self, name: str) -> str:
        if not self._enabled:
            return f"{_DISABLED}\n"
        return (
            f"No post-mortem of run {name!r} here: one is made when a critical condition starts or "
            "the run fails, by the agent of the node that holds rank 0.\n"
        )


def _settle(due: _Due, ended: Ended, now_seconds: float) -> None:
    """Give the conditions of the run what was found, or why nothing was."""
    try:
        line = "" if ended.problem else msgspec.json.decode(ended.printed, type=str)
    except msgspec.DecodeError:
        line, ended = "", ended.unreadable
    if problem := ended.problem:
        log.warning("run %s: %s cannot be analysed: %s", due.run.name, due.record, problem)
        line = f"No post-mortem: the flight record {due.record} cannot be analysed: {problem}."
    else:
        log.info("run %s: post-mortem %s", due.run.name, due.record / REPORT_PAGE)
    due.run.conditions.explain(line[:_FIRST_LINE_CHARACTERS_MAX], now_seconds)
