import os

import pytest

from tests.hosts.network import why_not


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """Where hosts cannot be made: skip, or in CI fail."""
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
