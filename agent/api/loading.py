"""Loads what serves the calls of a training script; never raises."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType


def loaded_probe() -> ModuleType | None:
    """Return what serves these calls, if `init` has come far enough to load it."""
    return sys.modules.get("mp_agent.probe.api")


def load_probe() -> ModuleType | None:
    """Return what serves these calls; None, with a line in the log, where it cannot be loaded."""
    try:
        return import_module("mp_agent.probe.api")
    except Exception as error:
        raise_interruption(error)
        log_failure("mp_agent cannot be loaded; training goes on unwatched")
        return None


def raise_interruption(error: Exception) -> None:
    """Raise what a signal handler of the script's has raised."""
    try:
        from mp_agent.ring.interruptions import interruption_in

        found = interruption_in(error)
    except Exception:
        return
    if found is not None:
        raise found


def log_failure(message: str) -> None:
    """Log the exception being handled; nothing where logging fails as well."""
    try:
        logging.getLogger("mp_agent").exception(message)
    except Exception:
        return
