import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mp_agent.exporters.otlp.environment import LOGGERS
from tests.e2e.observatory import Observatory, observatory
from tools.browser import chromium_arguments, find_browser
from tools.host_name import host_name_problem
from tools.servers import binaries

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that parallel workers end at about the same time.

    `make` finds the files of some marks by their text: another way to set one would run nowhere.
    """
    for mark in ("long", "alone"):
        for path in {item.path for item in items if item.get_closest_marker(mark)}:
            if f"mark.{mark}" not in path.read_text(encoding="utf-8"):
                raise pytest.UsageError(f"{path}: write pytest.mark.{mark} in the file itself")
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """End at once where torchrun cannot work, instead of letting each of its tests time out."""
    marks = ("e2e", "slow", "alone")
    if not session.config.option.collectonly and any(
        item.get_closest_marker(mark) for item in session.items for mark in marks
    ):
        _end_without_host_name()


def pytest_configure(config: pytest.Config) -> None:
    """Look before parallel workers start: they alone know the items then.

    How busy the machine is must not decide what the tests' tiny trainings measure. Threads that
    share the cores with those of other workers wait for each other longer than they compute.
    A shell starts what runs in its background with SIGINT ignored, which all our programs inherit.
    """
    atexit.unregister(gc.freeze)  # which is for the programs that tests start
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("MP_AGENT_OVERHEAD_BUDGET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if getattr(config.option, "numprocesses", None):
        _end_without_host_name()


def _end_without_host_name() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and (problem := host_name_problem()):
        pytest.exit(problem, returncode=pytest.ExitCode.INTERRUPTED)


@pytest.fixture(scope="session")
def server() -> Callable[[str], Path]:
    """Return a function that finds a binary; where it is missing, skips, or in CI fails."""

    def find(name: str) -> Path:
        found = binaries.find(name)
        if found is None:
            reason = f"{name} is neither on PATH nor available from apt"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
        return found

    return find


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A Chromium; where there is none, skips, or in CI fails. Its loop lasts for the module."""
    from playwright.sync_api import sync_playwright

    chromium = find_browser()
    if chromium is None:
        reason = "Chromium is not on PATH and cannot be installed by this user"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=chromium_arguments())
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def framework() -> Callable[[str], None]:
    """Return a function that asks for a training framework; absent, skips, or in CI fails."""

    def require(name: str) -> None:
        if find_spec(name) is None:
            reason = f"{name} is not installed; `make test` installs it"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)

    return require


@pytest.fixture(autouse=True)
def loggers_are_given_back() -> Iterator[None]:
    """Fail the test that leaves the exporters' loggers cut off: else only later ones would."""
    yield
    cut_off = [name for name in LOGGERS if not logging.getLogger(name).propagate]
    for name in cut_off:
        logging.getLogger(name).propagate = True
    assert not cut_off, "an OTLP service was started and not stopped"


@pytest.fixture(scope="session")
def watching(server, tmp_path_factory) -> Iterator[Observatory]:
    """Servers that watch example jobs: each runs once, for all tests that look at its data."""
    with observatory(server, tmp_path_factory.mktemp("observatory")) as observing:
        yield observing


@pytest.fixture
def nothing_compiled() -> None:
    """Forget what other tests compiled in this process: attention is not measured next to it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()
