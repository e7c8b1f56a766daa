"""Checks paths with the settings of their project."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mp_agent.lint.discovery import find_files, relative
from mp_agent.lint.results import CheckReport
from mp_agent.lint.runner import run
from mp_agent.lint.settings import load_settings, merged


def check_paths(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    jobs: int = 1,
) -> CheckReport:
    """Check files and folders; raises SettingError for a wrong path, code or setting."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    names = [os.fspath(path) for path in given]
    first = Path(names[0]) if names else Path()
    settings, base = load_settings(first if first.is_dir() else first.parent)
    settings = merged(settings, select, ignore)
    files = find_files(names, lambda path: settings.excludes(relative(path, base)))
    return run(files, lambda code, path: settings.applies(code, relative(path, base)), jobs=jobs)
