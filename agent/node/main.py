"""Configures settings and logging, and runs a node agent."""

import asyncio
import contextlib
import gc
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from mp_agent.errors import SettingError
from mp_agent.node.agent import NodeAgent
from mp_agent.node.logs import log_to_file, log_to_stderr
from mp_agent.ring.files import open_standard_streams
from mp_agent.settings import Settings
from mp_agent.settings.load import receive_settings

log = logging.getLogger("mp_agent.node")

_GC_THRESHOLDS = (20_000, 20, 10)
"""The rows of a large run live as long as its steps are open: Python's own thresholds would have
all of them searched for cycles, of which there are few, every few seconds."""


def watch_run(run_dir: Path, lock_fd: int, *, detached: bool) -> None:
    """Watch one run, whose lock is held, until it is over."""
    settings, ignored = _settings(run_dir.name, detached=detached)
    _log(settings, run_dir.name, detached=detached)
    agent = NodeAgent(settings, setting_errors=ignored)
    agent.watch(run_dir, lock_fd)
    _serve(agent)


def watch_directory(base: Path | None, *, detached: bool, with_parent: bool = False) -> None:
    """Watch every run that appears in `base` (the setting `dir`), until a signal.

    with_parent: also stop when the parent process is gone.
    """
    open_standard_streams()
    settings, ignored = _settings("node-agent", detached=detached)
    _log(settings, "node-agent", detached=detached)
    agent = NodeAgent(settings, setting_errors=ignored)
    agent.watch_all(base or settings.dir, with_parent=with_parent)
    _serve(agent)


def _settings(name: str, *, detached: bool) -> tuple[Settings, int]:
    """Return the settings, and how many were ignored.

    An agent that cannot read its settings stops with one line in the log: access control may be
    among them.
    """
    try:
        return receive_settings()
    except SettingError as error:
        _log(Settings(), name, detached=detached)
        log.error("the node agent stops and serves nothing: %s", error)
        raise SystemExit(1) from error


def end_process(exit_code: int) -> NoReturn:
    """End this process now.

    What trackers' packages do when the interpreter exits, and threads that look up a host, may
    take minutes where a server does not answer.
    """
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _serve(agent: NodeAgent) -> None:
    """Run to the end; a detached process has no stderr, so a fatal error is logged."""
    gc.set_threshold(*_GC_THRESHOLDS)
    loop = asyncio.new_event_loop()
    try:
        # Not asyncio.run, which waits for the threads of the loop's executor.
        loop.run_until_complete(agent.serve())
    except Exception:
        log.exception("the node agent stops")
        raise
    finally:
        loop.close()


def _log(settings: Settings, name: str, *, detached: bool) -> None:
    if detached:
        log_to_file(settings.log_dir, name)
    else:
        log_to_stderr()
