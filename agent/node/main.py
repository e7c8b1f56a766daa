"""From a command line to a running node agent."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

from mp_agent.node.agent import NodeAgent
from mp_agent.node.logs import log_to_file, log_to_stderr
from mp_agent.settings import ENV_PREFIX, SECRETS, Settings, load_settings

log = logging.getLogger("mp_agent.node")

SETTINGS_VARIABLE = "MP_AGENT_NODE_SETTINGS"
"""Holds, as JSON, the settings of the rank that starts a node agent, all but the token."""


def watch_run(run_dir: Path, lock_fd: int, *, detached: bool) -> None:
    """Watch one run, whose lock is held, until it is over."""
    settings, ignored = _settings()
    _log(settings, run_dir.name, detached=detached)
    agent = NodeAgent(settings, setting_errors=ignored)
    agent.watch(run_dir, lock_fd)
    _serve(agent)


def watch_directory(base: Path | None, *, detached: bool, with_parent: bool = False) -> None:
    """Watch every run that appears in `base` (the setting `dir`), until a signal ends it.

    with_parent: until the process that started this one is gone, too.
    """
    settings, ignored = _settings()
    _log(settings, "node-agent", detached=detached)
    agent = NodeAgent(settings, setting_errors=ignored)
    agent.watch_all(base or settings.dir, with_parent=with_parent)
    _serve(agent)


def _serve(agent: NodeAgent) -> None:
    """Work to the end; a detached process has no stderr, so what stops it goes to the log."""
    try:
        asyncio.run(agent.serve())
    except Exception:
        log.exception("the node agent stops")
        raise


def _settings() -> tuple[Settings, int]:
    """Return the settings of the rank that starts this agent, else those of the environment.

    The second value counts what was ignored; what the rank ignored, it counts itself.
    """
    handed_over = os.environ.get(SETTINGS_VARIABLE)
    if handed_over is None:
        return load_settings()
    try:
        return _taken_over(json.loads(handed_over)), 0
    except (ValueError, TypeError) as error:
        log.warning("%s is ignored: %s", SETTINGS_VARIABLE, error)
        settings, ignored = load_settings()
        return settings, ignored + 1


def _taken_over(values: Any) -> Settings:
    variables = {name: os.environ.get(ENV_PREFIX + name.upper()) for name in SECRETS}
    return Settings(**{**values, **{name: text for name, text in variables.items() if text}})


def _log(settings: Settings, name: str, *, detached: bool) -> None:
    if detached:
        log_to_file(settings.log_dir, name)
    else:
        log_to_stderr()
