import logging

import pytest

from mp_agent.errors import SettingError
from mp_agent.settings import Settings, load_settings
from tests.subtests import each


def test_argument_beats_variable_beats_file_beats_default(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.mp_agent]\nlayer_interval = 2\nwindow_seconds = 3.0\nmax_series = 400\n"
    )
    monkeypatch.setenv("MP_AGENT_LAYER_INTERVAL", "20")
    monkeypatch.setenv("MP_AGENT_WINDOW_SECONDS", "30")
    settings, ignored = load_settings(layer_interval=200)
    assert (settings.layer_interval, settings.window_seconds) == (200, 30.0)
    assert (settings.max_series, settings.linger_seconds, ignored) == (400, 120.0, 0)


@each(
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
        ("window_seconds", 1e-300),
        ("time_scale", 5e-324),
        ("layer_interval", 10**20),
        ("max_series", 10**20),
        ("rank_series", 10**20),
        ("flight_steps", 10**20),
        ("flight_records_max", 10**20),
        ("flight_bytes_max", 10**20),
        ("reduction_interval", 10**20),
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


def test_a_misspelt_variable_is_logged_with_the_one_that_was_meant_and_counted(monkeypatch, caplog):
    monkeypatch.setenv("MP_AGENT_LAYERS_INTERVAL", "5")
    monkeypatch.setenv("MP_AGENT_CRD_DIR", "/of/another/program")
    with caplog.at_level(logging.WARNING, logger="mp_agent"):
        settings, ignored = load_settings()
    assert settings.layer_interval == Settings().layer_interval and ignored == 1
    (said,) = caplog.messages
    assert "MP_AGENT_LAYERS_INTERVAL is no setting" in said
    assert "did you mean MP_AGENT_LAYER_INTERVAL?" in said


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


def test_of_a_binary_file_the_log_says_why_and_not_what_it_holds(monkeypatch, tmp_path, caplog):
    file = tmp_path / "archive"
    file.write_bytes(b"PK" + b"\xff\n" * 5000)
    monkeypatch.setenv("MP_AGENT_CONFIG", str(file))
    assert load_settings()[1] == 1
    (message,) = caplog.messages
    assert "can't decode byte 0xff" in message and len(message) < 300


def test_settings_file_that_is_missing_is_counted(monkeypatch):
    monkeypatch.setenv("MP_AGENT_CONFIG", "/nowhere/mp_agent.yaml")
    assert load_settings()[1] == 1
