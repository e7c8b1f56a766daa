import logging

import pytest

from mp_agent.errors import SettingError
from mp_agent.settings import kinds, load_settings


def test_lists_and_tables_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("MP_AGENT_EXPORTERS", "prometheus, prometheus")
    monkeypatch.setenv("MP_AGENT_THRESHOLDS", '{"grad_norm_high": 250}')
    settings, ignored = load_settings()
    assert settings.exporters == ("prometheus", "prometheus") and ignored == 0
    assert settings.thresholds == {"grad_norm_high": 250.0}


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


@pytest.mark.parametrize("name", ["root", "advertise"])
@pytest.mark.parametrize("address", ["node 0", "node-0\n:9464", "node\t0", "node\0"])
def test_an_address_with_spaces_or_control_characters_is_refused(name, address):
    with pytest.raises(SettingError, match=f"^{name} has value .*: must not contain spaces"):
        load_settings(**{name: address})


@pytest.mark.parametrize("name", ["root", "advertise"])
def test_space_around_an_address_as_of_a_file_that_is_read_is_no_part_of_it(name):
    assert getattr(load_settings(**{name: " node-0\n"})[0], name) == "node-0"


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


@pytest.fixture
def without_extra(monkeypatch) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(kinds, "find_spec", find)


def test_otlp_can_be_asked_for_where_its_packages_are():
    assert load_settings(exporters=("prometheus", "otlp"))[0].exporters == ("prometheus", "otlp")


def test_an_argument_that_needs_the_extra_raises_and_names_it(without_extra):
    with pytest.raises(SettingError, match=r"exporters.*mp-agent\[otlp\]"):
        load_settings(exporters=("otlp",))


def test_a_variable_that_needs_the_extra_is_logged_and_ignored(without_extra, monkeypatch, caplog):
    monkeypatch.setenv("MP_AGENT_EXPORTERS", "otlp")
    with caplog.at_level(logging.WARNING):
        loaded, ignored = load_settings()
    assert (loaded.exporters, ignored) == (("prometheus",), 1)
    assert "MP_AGENT_EXPORTERS" in caplog.text and "mp-agent[otlp]" in caplog.text


def test_prometheus_alone_needs_no_extra(without_extra):
    assert load_settings(exporters=("prometheus",))[0].exporters == ("prometheus",)


@pytest.mark.parametrize("text", ["true", "on", "skip_nonfinite, clip_spikes", True])
def test_the_guard_is_switched_on_by_a_word_or_by_names(monkeypatch, text):
    settings = load_settings(guard=text)[0]
    named = isinstance(text, str) and "," in text
    usual = ["skip_nonfinite", "clip_spikes", "hold_learning_rate"]
    assert list(settings.guard) == usual[: 2 if named else 3]
    assert settings.guard["clip_spikes"]["factor"] == 4.0


def test_policies_of_the_guard_are_adapted_by_a_table(monkeypatch):
    monkeypatch.setenv("MP_AGENT_GUARD", '{"widen_precision": {"modules": "head.*"}}')
    settings, ignored = load_settings()
    assert ignored == 0
    assert settings.guard["widen_precision"]["modules"] == "head.*"
    assert settings.guard["widen_precision"]["dtype"] == "fp32"


def test_policies_in_a_table_are_switched_on_and_off_by_a_word():
    guard = load_settings(guard={"skip_nonfinite": True, "clip_spikes": False})[0].guard
    assert list(guard) == ["skip_nonfinite"]


@pytest.mark.parametrize("nothing", [False, "false", {}, (), {"clip_spikes": False}])
def test_no_policy_is_no_guard(nothing):
    assert load_settings(guard=nothing)[0].guard == {}


@pytest.mark.parametrize("wrong", ["sikp_nonfinite", {"clip_spikes": {"factor": 0}}, 3])
def test_a_wrong_policy_is_named(wrong):
    with pytest.raises(SettingError, match=r"^guard has value "):
        load_settings(guard=wrong)


def test_trackers_are_known_by_name_and_need_their_package(monkeypatch):
    monkeypatch.setattr(kinds, "find_spec", lambda package: package != "mlflow" or None)
    assert load_settings(trackers="wandb, tensorboard, wandb")[0].trackers == (
        "wandb",
        "tensorboard",
    )
    with pytest.raises(SettingError, match=r"trackers has value .*'neptune' is unknown"):
        load_settings(trackers=["neptune"])
    with pytest.raises(SettingError, match=r"pip install 'mp-agent\[mlflow\]'"):
        load_settings(trackers=["mlflow"])


@pytest.mark.parametrize("text", ['{"*.gate": 2, "head": 1}', "*.gate=2, head=1"])
def test_routers_are_read_from_the_environment_in_either_form(text, monkeypatch):
    monkeypatch.setenv("MP_AGENT_ROUTERS", text)
    settings, ignored = load_settings()
    assert settings.routers == {"*.gate": 2, "head": 1} and ignored == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("*.gate", "does not say how many"),
        ({"*.gate": 0}, "at least 1"),
        ({"*.gate": 1.5}, "integer"),
        ({"": 2}, "pattern is empty"),
    ],
)
def test_a_router_pattern_that_says_nothing_usable_is_refused(value, message):
    with pytest.raises(SettingError, match=f"^routers.*{message}"):
        load_settings(routers=value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("0", False), ("off", False), ("after_trouble", "after_trouble")],
)
def test_local_gradients_are_on_or_off_or_measured_after_trouble(text, value, monkeypatch):
    monkeypatch.setenv("MP_AGENT_MEASURE_LOCAL_GRADIENTS", text)
    settings, ignored = load_settings()
    assert settings.measure_local_gradients == value
    assert type(settings.measure_local_gradients) is type(value)
    assert ignored == 0


def test_another_word_for_local_gradients_is_ignored_and_they_stay_off(monkeypatch):
    monkeypatch.setenv("MP_AGENT_MEASURE_LOCAL_GRADIENTS", "sometimes")
    settings, ignored = load_settings()
    assert (settings.measure_local_gradients, ignored) == (False, 1)


@pytest.mark.parametrize("name", ["dir", "log_dir", "flight_dir", "sd_dir", "baseline"])
def test_a_path_that_no_system_can_open_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=rf"^{name} has value '/a\\x00b': must not contain NUL"):
        load_settings(**{name: "/a\0b"})
