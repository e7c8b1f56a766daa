import os
import tempfile

from tools.tables import settings_table


def test_the_table_of_settings_is_the_same_for_every_user_on_every_machine(monkeypatch, tmp_path):
    here = settings_table()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 4711)

    assert settings_table() == here
    assert "`<temporary directory>/mp_agent-<uid>/flight`" in here
    assert "`/dev/shm/mp_agent-<uid>`" in here
