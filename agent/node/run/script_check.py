"""Checks the main script of each run that wants it, in a separate process."""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from mp_agent.node.run.run import Run
from mp_agent.records.views import ScriptFindings
from mp_agent.ring import locations

log = logging.getLogger("mp_agent.node")

SECONDS_MAX = 600.0
"""The check runs at the lowest priority; its CPU time and memory have their own limits."""
_OUTPUT_BYTES_MAX = 1 << 20
_REASON_LENGTH_MAX = 500
_COMMAND = ("-m", "mp_agent.lint.script")


class _Summary(msgspec.Struct, forbid_unknown_fields=True):
    """What the process prints."""

    files: int
    counts: dict[str, int]
    findings: list[str]
    problems: list[str]


@dataclass(slots=True)
class _Check:
    run: Run
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    """Standard output and error, in a file: a full pipe would block the process."""
    deadline_seconds: float

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.output.close()


class ScriptChecks:
    """A service of the node agent: checks one script at a time, each once per start of its run.

    Only at the root agent, which exports what is of the run. A check that fails is a line in the
    log and 0 files in the metrics; it never affects anything else.
    """

    def __init__(self, runs: Callable[[], Iterable[Run]]) -> None:
        self._runs = runs
        self._sessions: dict[Path, str] = {}
        """Attempts whose script was checked, by directory of the run."""
        self._check: _Check | None = None

    def start(self) -> None:
        """Do nothing: a check starts when a run asks for it."""

    def tick(self, now_seconds: float) -> None:
        """Take the result of the check that has ended, or start the next one."""
        if self._check is not None:
            self._poll(self._check, now_seconds)
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
            self._check.close()
            self._check = None

    def _begin(self, run: Run, script: str, now_seconds: float) -> None:
        try:
            with ExitStack() as stack:
                output = stack.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    [sys.executable, *_COMMAND, script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    env=_environment(),
                )
                stack.pop_all()
        except (OSError, ValueError) as error:
            _failed(run, str(error))
            return
        self._check = _Check(run, process, output, now_seconds + SECONDS_MAX)

    def _poll(self, check: _Check, now_seconds: float) -> None:
        status = check.process.poll()
        if status is None and now_seconds < check.deadline_seconds:
            return
        self._check = None
        if status is None:
            check.close()
            _failed(check.run, f"it took more than {SECONDS_MAX:g} s")
            return
        check.output.seek(0)
        printed = check.output.read(_OUTPUT_BYTES_MAX)
        check.close()
        _settle(check.run, status, printed)


def _settle(run: Run, status: int, printed: bytes) -> None:
    """Give the run what the process found."""
    try:
        summary = msgspec.json.decode(printed, type=_Summary) if status == 0 else None
    except msgspec.DecodeError:
        summary = None
    if summary is None:
        text = printed.decode(errors="replace").strip()[-_REASON_LENGTH_MAX:]
        _failed(run, f"exit status {status}: {text}" if text else f"exit status {status}")
        return
    run.script_findings = ScriptFindings(files=summary.files, counts=summary.counts)
    found = sum(summary.counts.values())
    log.info("run %s: %d findings in %d files of its code", run.name, found, summary.files)
    for line in (*summary.findings, *summary.problems):
        log.info("run %s: %s", run.name, line)


def _failed(run: Run, reason: str) -> None:
    run.script_findings = ScriptFindings(files=0)
    log.warning("run %s: the main script cannot be checked: %s", run.name, reason)


def _environment() -> dict[str, str]:
    """Return this process's variables, with the mp_agent that runs here on the import path."""
    environment = dict(os.environ)
    environment.pop("MP_AGENT_ATTACH", None)
    found = str(Path(locations.__file__).parents[2])
    paths = filter(None, (environment.get("PYTHONPATH"), found))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
