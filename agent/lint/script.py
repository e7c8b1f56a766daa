"""Checks a training script and what it imports of its project: `python -m mp_agent.lint.script`.

The node agent runs it in a separate process, so that no code under check can delay or end it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mp_agent.errors import SettingError
from mp_agent.inputs.files import limit_resources
from mp_agent.lint.finding import CheckReport
from mp_agent.lint.interpret.modules import Project, imported_names, module_file, search_root
from mp_agent.lint.runner import load_settings, relative, run

FILES_MAX = 200
CPU_SECONDS_MAX = 60
MEMORY_BYTES_MAX = 2 << 30
_NICENESS = 19
_LINES_MAX = 20
_LINE_LENGTH_MAX = 300


def check_script(path: str, *, files_max: int = FILES_MAX) -> CheckReport:
    """Check a script and the files of its project that it imports, with the project's settings.

    At most `files_max` files, those nearest to the script. Raises SettingError where the settings
    cannot be used.
    """
    script = os.path.abspath(path)
    settings, base = load_settings(Path(script).parent)
    files = [
        file
        for file in imported_files(script, files_max)
        if file == script or not settings.excludes(relative(file, base))
    ]
    return run(files, lambda code, file: settings.applies(code, relative(file, base)))


def imported_files(script: str, files_max: int) -> Iterator[str]:
    """Yield the script and what it imports, directly or not, the nearest first."""
    project = Project()
    found, waiting = {script}, deque([script])
    while waiting and files_max > 0:
        path = waiting.popleft()
        files_max -= 1
        yield path
        module = project.load(path)
        if module is None:
            continue
        root = search_root(module)
        for name in imported_names(module):
            file = module_file(name, root, module)
            if file is not None and file not in found:
                found.add(file)
                waiting.append(file)


def summary(report: CheckReport) -> dict[str, Any]:
    """Return what the node agent needs: files that were checked, findings by rule, and texts."""
    problems = [
        *(f"{one.path}: not checked: {one.reason}" for one in report.skipped),
        *(f"{one.path}: {one.message}" for one in report.errors),
    ]
    findings = [f"{one.path}:{one.span.line}: {one.code} {one.message}" for one in report.findings]
    return {
        "files": report.files - len(report.skipped),
        "counts": report.counts(),
        "findings": _limited(findings),
        "problems": _limited(problems),
    }


def _limited(lines: list[str]) -> list[str]:
    return [line[:_LINE_LENGTH_MAX] for line in lines[:_LINES_MAX]]


def main(arguments: list[str]) -> int:
    """Print the summary of the check of one script as JSON; 1 if there is none."""
    (path,) = arguments
    limit_resources(niceness=_NICENESS, cpu_seconds=CPU_SECONDS_MAX, memory_bytes=MEMORY_BYTES_MAX)
    if not os.path.isfile(path):
        print(f"{path} is not a file here", file=sys.stderr)
        return 1
    try:
        report = check_script(path)
    except SettingError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(summary(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
