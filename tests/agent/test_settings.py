import logging
from pathlib import Path

import pytest

from mp_agent.errors import SettingError
from mp_agent.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MP_AGENT_{name.upper()}", raising=False)
    monkeypatch.delenv("MP_AGENT_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def test_argument_beats_variable_beats_file_beats_default(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.mp_agent]\nlayer_interval = 2\nwindow_seconds = 3.0\nmax_series = 400\n"
    )
    monkeypatch.setenv("MP_AGENT_LAYER_INTERVAL", "20")
    monkeypatch.setenv("MP_AGENT_WINDOW_SECONDS", "30")
    settings, ignored = load_settings(layer_interval=200)
    assert (settings.layer_interval, settings.window_seconds) == (200, 30.0)
    assert (settings.max_series, settings.linger_seconds, ignored) == (400, 120.0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_interval", 0),
        ("port", 70000),
        ("node_agent", "thread"),
        ("dir", "relative/path"),
        ("thresholds", {"grad_norm_high": -1.0}),
        ("thresholds", {"no_such": 1.0}),
        ("exporters", ("carrier-pigeon",)),
        ("no_such_setting", 1),
    ],
)
def test_wrong_argument_raises_naming_field_and_value(name, value):
    with pytest.raises(SettingError) as raised:
        load_settings(**{name: value})
    assert name in str(raised.value) and repr(value) in str(raised.value)


def test_kubernetes_service_variable_is_logged_counted_and_ignored(monkeypatch, caplog):
    monkeypatch.setenv("MP_AGENT_PORT", "tcp://10.0.0.1:9464")
    monkeypatch.setenv("MP_AGENT_PORT_9464_TCP_ADDR", "10.0.0.1")
    with caplog.at_level(logging.WARNING, logger="mp_agent"):
        settings, ignored = load_settings()
    assert settings.port is None and ignored == 1
    assert "MP_AGENT_PORT has value 'tcp://10.0.0.1:9464'" in caplog.text


def test_wrong_file_value_is_counted_and_the_others_hold(monkeypatch, tmp_path, caplog):
    file = tmp_path / "mp_agent.yaml"
    file.write_text("linger_seconds: soon\nmax_series: 500\nunknown_key: 1\n")
    monkeypatch.setenv("MP_AGENT_CONFIG", str(file))
    settings, ignored = load_settings()
    assert (settings.max_series, settings.linger_seconds, ignored) == (500, 120.0, 2)
    assert "linger_seconds has value 'soon'" in caplog.text


@pytest.mark.parametrize("text", ["[1, 2", "- just\n- a list\n", "\x00"])
def test_unreadable_settings_file_is_counted_and_ignored(monkeypatch, tmp_path, text):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    monkeypatch.setenv("MP_AGENT_CONFIG", str(file))
    settings, ignored = load_settings()
    assert ignored == 1 and settings.layer_interval == 100


def test_settings_file_that_is_missing_is_counted(monkeypatch):
    monkeypatch.setenv("MP_AGENT_CONFIG", "/nowhere/mp_agent.yaml")
    assert load_settings()[1] == 1


def test_lists_and_tables_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("MP_AGENT_EXPORTERS", "prometheus, prometheus")
    monkeypatch.setenv("MP_AGENT_THRESHOLDS", '{"grad_norm_high": 250}')
    settings, ignored = load_settings()
    assert settings.exporters == ("prometheus", "prometheus") and ignored == 0
    assert settings.thresholds == {"grad_norm_high": 250.0}


def test_settings_survive_the_way_to_the_node_agent_as_json():
    settings, _ = load_settings(dir=Path("/dev/shm/elsewhere"), thresholds={"grad_norm_low": 0.5})
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_a_token_is_shown_in_no_message_and_no_repr(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("MP_AGENT_TOKEN", "two words")
    settings, ignored = load_settings()
    assert ignored == 1
    assert settings.token.get_secret_value() == ""
    assert "MP_AGENT_TOKEN has value (hidden)" in caplog.text
    with pytest.raises(SettingError, match=r"^token has value \(hidden\): ") as caught:
        load_settings(token="wörd")
    settings, _ = load_settings(token=" good \n")
    assert settings.token.get_secret_value() == "good"
    shown = caplog.text + str(caught.value) + repr(settings) + settings.model_dump_json()
    for secret in ("two words", "wörd", "good"):
        assert secret not in shown


@pytest.mark.parametrize("root", ["head", "head:9464", "[fe80::1]:9464", "https://proxy/a", ""])
def test_a_root_may_be_a_host_an_address_or_a_url(root):
    assert load_settings(root=root)[0].root == root


@pytest.mark.parametrize("root", ["head:port", "head:99999", "ftp://head", "fe80::1", "http://"])
def test_a_root_that_leads_nowhere_is_refused(root):
    with pytest.raises(SettingError, match="root has value"):
        load_settings(root=root)


def test_overrides_of_alerts_are_a_table_of_texts(monkeypatch, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("alerts:\n  stall_window: 20m\n  end_window: 90\n  MpAgentLossSpike: off\n")
    monkeypatch.setenv("MP_AGENT_CONFIG", str(file))
    settings, ignored = load_settings()

    assert ignored == 0
    assert settings.alerts == {"stall_window": "20m", "end_window": "90", "MpAgentLossSpike": "off"}


@pytest.mark.parametrize("value", ["[1]", '{"stall_window": [1]}', "20m"])
def test_what_is_no_table_of_texts_is_ignored_by_name(monkeypatch, caplog, value):
    monkeypatch.setenv("MP_AGENT_ALERTS", value)
    settings, ignored = load_settings()

    assert (settings.alerts, ignored) == ({}, 1)
    assert "MP_AGENT_ALERTS has value" in caplog.text
