"""The doctor names settings that are not in force, and shows no secret."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from mp_agent.doctor.machine import CheckStatus, Machine, settings_and_ignored
from mp_agent.settings import Settings
from tests.agent.doctor.conftest import found, only, verdicts


def machine_here(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Machine:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings, ignored = settings_and_ignored()
    return Machine(settings, ignored=ignored)


def test_each_setting_is_shown_with_its_origin_and_a_secret_without_its_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "settings.yaml").write_text("layer_interval: 7\n")
    machine = machine_here(
        monkeypatch,
        MP_AGENT_CONFIG=str(tmp_path / "settings.yaml"),
        MP_AGENT_RUN="llama",
        MP_AGENT_TOKEN="tell-nobody",
    )
    texts = [finding.text for finding in found("settings", machine)]
    assert "run is 'llama', by MP_AGENT_RUN" in texts
    assert "layer_interval is 7, by the settings file" in texts
    assert "token is (hidden), by MP_AGENT_TOKEN" in texts
    assert "tell-nobody" not in str(texts)


def test_an_ignored_value_is_named_and_a_secret_one_hidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = machine_here(monkeypatch, MP_AGENT_LAYER_INTERVAL="soon", MP_AGENT_TOKEN="two words")
    findings = found("ignored-settings", machine)
    assert {finding.verdict for finding in findings} == {CheckStatus.WRONG}
    text = " ".join(finding.text for finding in findings)
    assert "MP_AGENT_LAYER_INTERVAL has value 'soon'" in text
    assert "MP_AGENT_TOKEN has value (hidden)" in text
    assert "two words" not in text
    assert not caplog.records


def test_nothing_set_is_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_here(monkeypatch)
    names = ("settings", "ignored-settings", "variables", "kubernetes-service", "enabled")
    for name in (*names, "node-agent-setting", "exporters"):
        assert verdicts(name, machine) == {CheckStatus.OK}


def test_a_misspelt_variable_is_reported_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = machine_here(monkeypatch, MP_AGENT_LAYER_INTERVALL="5", MP_AGENT_DIR="/x")
    finding = only("ignored-settings", machine)
    assert finding.verdict is CheckStatus.WRONG
    assert "MP_AGENT_LAYER_INTERVALL" in finding.text
    assert "MP_AGENT_LAYER_INTERVAL?" in finding.text
    assert verdicts("variables", machine) == {CheckStatus.OK}


def test_a_variable_like_no_setting_is_only_mentioned() -> None:
    assert verdicts("variables", Machine(Settings(), environ={"MP_AGENT_FOO_BAR": "1"})) == {
        CheckStatus.UNKNOWN
    }


SERVICE = {
    "MP_AGENT_SERVICE_HOST": "10.0.0.7",
    "MP_AGENT_SERVICE_PORT": "9464",
    "MP_AGENT_PORT": "tcp://10.0.0.7:9464",
    "MP_AGENT_PORT_9464_TCP": "tcp://10.0.0.7:9464",
    "MP_AGENT_PORT_9464_TCP_ADDR": "10.0.0.7",
}


def test_a_kubernetes_service_of_that_name_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_here(monkeypatch, **SERVICE)
    finding = only("kubernetes-service", machine)
    assert finding.verdict is CheckStatus.WRONG
    assert "enableServiceLinks: false" in finding.remedy
    assert verdicts("variables", machine) == {CheckStatus.OK}
    assert "MP_AGENT_PORT has value" in only("ignored-settings", machine).text


@pytest.mark.parametrize(
    ("check", "changes", "verdict"),
    [
        ("enabled", {"enabled": False}, CheckStatus.WRONG),
        ("node-agent-setting", {"node_agent": "none"}, CheckStatus.WRONG),
        ("node-agent-setting", {"node_agent": "external"}, CheckStatus.OK),
        ("exporters", {"exporters": ()}, CheckStatus.WRONG),
        ("exporters", {"exporters": ("otlp",)}, CheckStatus.UNKNOWN),
    ],
)
def test_settings_that_keep_series_away_are_reported(
    check: str, changes: dict[str, object], verdict: CheckStatus
) -> None:
    finding = only(check, Machine(Settings().model_copy(update=changes)))
    assert finding.verdict is verdict
    assert finding.remedy or verdict is CheckStatus.OK


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the port speaks HTTP"),
        (
            {"basic_auth_user": "a", "basic_auth_password": SecretStr("b")},
            "the port speaks HTTP, requires user and password",
        ),
    ],
)
def test_what_the_port_asks_for_is_said(
    changes: dict[str, object], said: str, settings: Settings
) -> None:
    machine = Machine(settings.model_copy(update=changes))
    assert (only("access", machine).verdict, only("access", machine).text) == (CheckStatus.OK, said)


def test_settings_of_the_port_that_contradict_are_reported(settings: Settings) -> None:
    for changes in ({"basic_auth_user": "a"}, {"tls_client_ca": Path("/nowhere/ca.pem")}):
        finding = only("access", Machine(settings.model_copy(update=changes)))
        assert finding.verdict is CheckStatus.WRONG
        assert "is set, but" in finding.text or "is not set" in finding.text


def test_an_override_of_alerts_that_is_none_is_ignored_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = machine_here(monkeypatch, MP_AGENT_ALERTS='{"stall_windoww": "20m"}')
    finding = only("ignored-settings", machine)
    assert finding.verdict is CheckStatus.WRONG
    assert "stall_windoww" in finding.text
