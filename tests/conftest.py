import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import servers


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
