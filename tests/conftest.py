import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mp_agent.exporters.otlp.redaction import LOGGERS
from tests.e2e.observatory import Observatory, observatory
from tools import servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that parallel workers end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


@pytest.fixture(scope="session")
def server() -> Callable[[str], Path]:
    """Return a function that finds a binary; where it is missing, skips, or in CI fails."""

    def find(name: str) -> Path:
        found = servers.find(name)
        if found is None:
            reason = f"{name} is neither on PATH nor to be had by apt"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
        return found

    return find


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
