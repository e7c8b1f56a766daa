"""What separate processes do for the node agent, within bounds, without delaying it.

They check the main script of each run that wants it, and analyse the flight record of each run in
trouble, of which the newest post-mortem is served.
"""

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
from aiohttp import web

from mp_agent.catalog.metrics.run import POSTMORTEMS
from mp_agent.flight.record.store import REPORT_DOCUMENT, REPORT_PAGE, newest_report
from mp_agent.node.flight.service import FlightService, WrittenRecord
from mp_agent.node.run.run import Run
from mp_agent.records.views import ScriptFindings
from mp_agent.ring import locations
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent.node")

SECONDS_MAX = 600.0
"""Children run at a low priority; their CPU time and memory have their own limits."""
_OUTPUT_BYTES_MAX = 1 << 20
_REASON_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """What a child printed, or why there is nothing."""

    printed: bytes = b""
    problem: str = ""

    @property
    def unreadable(self) -> "Ended":
        """The same as an end whose output is not what was expected, with what it is."""
        return Ended(problem=_with_output(0, self.printed))


def _with_output(status: int, printed: bytes) -> str:
    text = printed.decode(errors="replace").strip()[-_REASON_LENGTH_MAX:]
    return f"exit status {status}: {text}" if text else f"exit status {status}"


@dataclass(slots=True)
class Child:
    """A Python program that runs in a separate process; it limits itself."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    """Standard output and error, in a file: a full pipe would block the process."""
    seconds_max: float
    deadline_seconds: float

    def poll(self, now_seconds: float) -> Ended | None:
        """Return how it ended; None while it runs. After its time it is killed."""
        status = self.process.poll()
        if status is None and now_seconds < self.deadline_seconds:
            return None
        if status is None:
            self.close()
            return Ended(problem=f"it took more than {self.seconds_max:g} s")
        self.output.seek(0)
        printed = self.output.read(_OUTPUT_BYTES_MAX)
        self.close()
        if status == 0:
            return Ended(printed)
        return Ended(problem=_with_output(status, printed))

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.output.close()


def start_child(
    arguments: Sequence[str], *, seconds_max: float, now_seconds: float
) -> Child | Ended:
    """Start Python with some arguments; the result says why if that fails."""
    try:
        with ExitStack() as stack:
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_environment(),
            )
            stack.pop_all()
    except (OSError, ValueError) as error:
        return Ended(problem=str(error))
    return Child(process, output, seconds_max, now_seconds + seconds_max)


def _environment() -> dict[str, str]:
    """Return this process's variables, with the mp_agent that runs here on the import path."""
    environment = dict(os.environ)
    environment.pop("MP_AGENT_ATTACH", None)
    # One thread: the others would be taken from the training.
    environment.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    found = str(Path(locations.__file__).parents[2])
    paths = filter(None, (environment.get("PYTHONPATH"), found))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


_SCRIPT_CHECK = ("-m", "mp_agent.lint.script")


class _Summary(msgspec.Struct, forbid_unknown_fields=True):
    """What the process prints."""

    files: int
    counts: dict[str, int]
    findings: list[str]
    problems: list[str]


class ScriptChecks:
    """A service of the node agent: checks one script at a time, each once per start of its run.

    Only at the root agent, which exports what is of the run. A check that fails is a line in the
    log and 0 files in the metrics; it never affects anything else.
    """

    def __init__(self, runs: Callable[[], Iterable[Run]]) -> None:
        self._runs = runs
        self._sessions: dict[Path, str] = {}
        """Attempts whose script was checked, by directory of the run."""
        self._check: tuple[Run, Child] | None = None

    def start(self) -> None:
        """Do nothing: a check starts when a run asks for it."""

    def tick(self, now_seconds: float) -> None:
        """Take the result of the check that has ended, or start the next one."""
        if self._check is not None:
            run, child = self._check
            if (ended := child.poll(now_seconds)) is not None:
                self._check = None
                _settle_script(run, ended)
            return
        runs = list(self._runs())
        known = {run.run_dir for run in runs}
        self._sessions = {path: one for path, one in self._sessions.items() if path in known}
        for run in runs:
            wanted = run.seen and run.is_root and self._sessions.get(run.run_dir) != run.session
            if wanted and (script := run.script):
                self._sessions[run.run_dir] = run.session
                self._begin(run, script, now_seconds)
                return

    async def stop(self, deadline_seconds: float) -> None:
        """End the check that is under way."""
        if self._check is not None:
            self._check[1].close()
            self._check = None

    def _begin(self, run: Run, script: str, now_seconds: float) -> None:
        child = start_child(
            (*_SCRIPT_CHECK, script), seconds_max=SECONDS_MAX, now_seconds=now_seconds
        )
        if isinstance(child, Ended):
            _settle_script(run, child)
        else:
            self._check = run, child


def _settle_script(run: Run, ended: Ended) -> None:
    """Give the run what the process found."""
    try:
        summary = None if ended.problem else msgspec.json.decode(ended.printed, type=_Summary)
    except msgspec.DecodeError:
        summary, ended = None, ended.unreadable
    if summary is None:
        run.script_findings = ScriptFindings(files=0)
        log.warning("run %s: the main script cannot be checked: %s", run.name, ended.problem)
        return
    run.script_findings = ScriptFindings(files=summary.files, counts=summary.counts)
    found = sum(summary.counts.values())
    log.info("run %s: %d findings in %d files of its code", run.name, found, summary.files)
    for line in (*summary.findings, *summary.problems):
        log.info("run %s: %s", run.name, line)


OTHER_NODES_SECONDS = 10.0
"""Time for other nodes to write the same steps, where they share the directory."""
_ANALYSIS = ("-m", "mp_agent.node.commands.flight")
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
        arguments = (*_ANALYSIS, str(due.record))
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
