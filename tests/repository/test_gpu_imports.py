"""tests/gpu can be collected where there is only torch, pytest, and what mp_agent itself needs."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

_COLLECT = """
import json, sys
from importlib.machinery import PathFinder

absent, find = set(json.loads(sys.stdin.read())), PathFinder.find_spec

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in absent else find(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
import pytest
options = ["--confcutdir=tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
sys.exit(pytest.main(["tests/gpu", *options]))
"""
"""Collects them as if the packages that are named at its input were not installed."""


def _needed(roots: set[str]) -> set[str]:
    """Return distributions and all that they require, without extras."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        for line in lines:
            if "extra ==" not in line and (match := re.match(r"[A-Za-z0-9._-]+", line)):
                waiting.append(match.group())
    return found


@pytest.mark.slow
def test_collecting_them_needs_nothing_else() -> None:
    needed = _needed({"torch", "pytest", "mp-agent"})
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & needed
    ]
    assert {"hypothesis", "playwright", "trustme"} <= set(absent)
    ran = subprocess.run(
        (sys.executable, "-c", _COLLECT),
        cwd=_ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        input=json.dumps(absent),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "tests/gpu/test_runtime.py" in ran.stdout
