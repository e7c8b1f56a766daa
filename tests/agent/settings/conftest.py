import pytest

from mp_agent.settings import CONFIG_VARIABLE, ENV_PREFIX, Settings
from mp_agent.settings.load import HANDOVER_VARIABLE


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in Settings.model_fields:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)
    monkeypatch.delenv(HANDOVER_VARIABLE, raising=False)
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
