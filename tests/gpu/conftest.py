import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.machine import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine.of(monkeypatch)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In shared memory, as real rings are: Linux lets no device write to files on disks for long.

    Registering a ring there would be refused, and only the fallback be tested.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
