import os
import tempfile

from mp_agent.settings import ENV_PREFIX, Settings
from tests.docs.pages import ROOT
from tools.generators.settings_reference import settings_files, settings_table


def test_every_setting_has_one_row_with_its_variable_and_meaning() -> None:
    rows = settings_table().splitlines()[2:]
    assert len(rows) == len(Settings.model_fields)
    for row, (name, field) in zip(rows, Settings.model_fields.items(), strict=True):
        assert row.startswith(f"| `{name}` | `{ENV_PREFIX}{name.upper()}` |")
        assert field.description
        assert row.endswith(f"| {field.description.replace('|', chr(92) + '|')} |")


def test_the_table_is_the_same_for_every_user_on_every_machine(monkeypatch, tmp_path):
    here = settings_table()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 4711)

    assert settings_table() == here
    assert "`<temporary directory>/mp_agent-<uid>/flight`" in here
    assert "`/dev/shm/mp_agent-<uid>`" in here


def test_the_committed_reference_is_current() -> None:
    for path, text in settings_files().items():
        assert (ROOT / path).read_text("utf-8") == text, "run `make generate`"
