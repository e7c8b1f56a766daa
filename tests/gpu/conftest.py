import pytest

from tests.gpu.machine import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine.of(monkeypatch)
