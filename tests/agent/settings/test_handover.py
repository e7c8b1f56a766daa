import json
import math

import pytest
from pydantic import ValidationError

from mp_agent.errors import SettingError
from mp_agent.settings import SECRETS, Settings, load_settings
from mp_agent.settings.load import HANDOVER_VARIABLE, handed_over, receive_settings

GIVEN = Settings(
    port=1234,
    dir="/dev/shm/elsewhere",
    thresholds={"grad_norm_high": 5.0},
    token="secret",
    basic_auth_user="scraper",
    basic_auth_password="hush-hush",
)


def test_settings_are_taken_over_as_they_were_whatever_else_the_environment_says(monkeypatch):
    monkeypatch.setenv("MP_AGENT_PORT", "tcp://10.0.0.1:9464")
    for name, value in handed_over(GIVEN).items():
        monkeypatch.setenv(name, value)

    assert receive_settings() == (GIVEN, 0)


def test_secrets_go_in_variables_of_their_own():
    variables = handed_over(GIVEN)

    assert variables["MP_AGENT_TOKEN"] == "secret"
    assert variables["MP_AGENT_BASIC_AUTH_PASSWORD"] == "hush-hush"
    assert not set(SECRETS) & set(json.loads(variables[HANDOVER_VARIABLE]))


def test_where_nothing_is_handed_over_the_environment_counts(monkeypatch):
    monkeypatch.setenv("MP_AGENT_LINGER_SECONDS", "3")

    assert receive_settings() == (Settings(linger_seconds=3), 0)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"port": "x"}', '{"unknown": 1}', "[" * 9999]
)
def test_what_cannot_be_read_is_never_replaced_by_the_environment(monkeypatch, text):
    monkeypatch.setenv(HANDOVER_VARIABLE, text)

    with pytest.raises(SettingError, match=HANDOVER_VARIABLE):
        receive_settings()


def test_a_secret_that_cannot_be_used_is_shown_in_no_message(monkeypatch):
    for name, value in handed_over(GIVEN).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MP_AGENT_TOKEN", "two words")

    with pytest.raises(SettingError) as refusal:
        receive_settings()
    assert "two words" not in str(refusal.value)


def _floats() -> list[str]:
    return [name for name, field in Settings.model_fields.items() if field.annotation is float]


_HUGE = 1.7976931348623157e308
_TINY = 5e-324
_REFUSED = {
    "time_scale": (math.inf, _HUGE, _TINY),
    "window_seconds": (_TINY,),
    "root_core_share": (math.inf, _HUGE),
}


@pytest.mark.parametrize("value", [math.inf, 0.1 + 0.2, _TINY, _HUGE])
def test_every_float_arrives_exactly(monkeypatch, subtests, value):
    for name in _floats():
        with subtests.test(name), monkeypatch.context() as patched:
            _assert_arrives(patched, name, value)


def _assert_arrives(monkeypatch, name, value):
    if value in _REFUSED.get(name, ()):
        with pytest.raises(ValidationError):
            Settings(**{name: value})
        return
    given = Settings(**{name: value})
    for variable, text in handed_over(given).items():
        monkeypatch.setenv(variable, text)

    assert receive_settings() == (given, 0)
    assert getattr(receive_settings()[0], name) == value


def test_paths_that_are_not_utf8_arrive(monkeypatch):
    given = Settings(log_dir="/tmp/\udcff", sd_dir="/shared/\udce4")
    for name, value in handed_over(given).items():
        monkeypatch.setenv(name, value)

    assert receive_settings() == (given, 0)


def test_guards_that_were_refused_stay_refused_in_the_other_process(monkeypatch):
    monkeypatch.setenv("MP_AGENT_TLS_CERTIFICATE", "relative.pem")
    monkeypatch.setenv("MP_AGENT_TLS_KEY", "relative.key")
    for name, value in handed_over(load_settings()[0]).items():
        monkeypatch.setenv(name, value)

    assert receive_settings()[0].refused_guards == ("tls_certificate", "tls_key")
