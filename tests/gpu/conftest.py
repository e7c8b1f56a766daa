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
