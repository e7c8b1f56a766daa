"""Checks the main script of each run that wants it, in a separate process."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from mp_agent.node.run.child import Child, Ended, start_child
from mp_agent.node.run.run import Run
from mp_agent.records.views import ScriptFindings

log = logging.getLogger("mp_agent.node")

SECONDS_MAX = 600.0
"""The check runs at the lowest priority; its CPU time and memory have their own limits."""
_COMMAND = ("-m", "mp_agent.lint.script")


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
                _settle(run, ended)
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
        child = start_child((*_COMMAND, script), seconds_max=SECONDS_MAX, now_seconds=now_seconds)
        if isinstance(child, Ended):
            _settle(run, child)
        else:
            self._check = run, child


def _settle(run: Run, ended: Ended) -> None:
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
