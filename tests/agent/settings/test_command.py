"""`mp-agent settings` shows what is in force; its schema accepts what the settings accept."""

import json
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from mp_agent.settings import Settings
from mp_agent.settings.command import settings_command, settings_schema
from tests.subtests import each


def test_values_in_force_are_shown_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MP_AGENT_LAYER_INTERVAL", "37")
    monkeypatch.setenv("MP_AGENT_TOKEN", "a-secret-of-twenty-characters")
    output = CliRunner().invoke(settings_command).output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.split()}
    assert rows["MP_AGENT_LAYER_INTERVAL"][:2] == ["37", "100"]
    assert rows["MP_AGENT_TOKEN"][0] == "(hidden)"
    assert "a-secret" not in output
    assert {f"MP_AGENT_{name.upper()}" for name in Settings.model_fields} <= rows.keys()


@each(
    ("values", "accepted"),
    [
        ({}, True),
        ({"layer_interval": 50, "run": "llama", "thresholds": {"grad_norm_high": 50}}, True),
        ({"exporters": ["prometheus"], "guard": {}}, True),
        ({"layer_interval": "often"}, False),
        ({"node_agent": "sidecar"}, False),
        ({"port": 70000}, False),
        ({"layer_intervall": 50}, False),
    ],
)
def test_the_schema_accepts_what_the_settings_do(values: dict[str, Any], accepted: bool) -> None:
    printed = json.loads(CliRunner().invoke(settings_command, ["--schema"]).output)
    assert printed == settings_schema()
    jsonschema.Draft202012Validator.check_schema(printed)
    assert jsonschema.Draft202012Validator(printed).is_valid(values) is accepted
    if accepted:
        Settings(**values)
    else:
        with pytest.raises(ValueError):
            Settings(**values)
