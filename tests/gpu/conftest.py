import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.machine import Machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, let torch warn of what it finds: that depends on its release and its streams."""
    if not torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("default"))


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
