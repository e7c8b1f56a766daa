import json

import pytest

from mp_agent.settings import SECRETS, Settings
from mp_agent.settings.handover import HANDOVER_VARIABLE, handed_over, take_over

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

    assert take_over() == (GIVEN, 0)


def test_secrets_go_in_variables_of_their_own():
    variables = handed_over(GIVEN)

    assert variables["MP_AGENT_TOKEN"] == "secret"
    assert variables["MP_AGENT_BASIC_AUTH_PASSWORD"] == "hush-hush"
    assert not set(SECRETS) & set(json.loads(variables[HANDOVER_VARIABLE]))


def test_where_nothing_is_handed_over_the_environment_counts(monkeypatch):
    monkeypatch.setenv("MP_AGENT_LINGER_SECONDS", "3")

    assert take_over() == (Settings(linger_seconds=3), 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"port": "x"}', '{"unknown": 1}'])
def test_what_cannot_be_used_is_counted_and_logged(monkeypatch, caplog, text):
    monkeypatch.setenv(HANDOVER_VARIABLE, text)

    assert take_over() == (Settings(), 1)
    assert f"{HANDOVER_VARIABLE} is ignored" in caplog.text


def test_a_secret_that_cannot_be_used_is_shown_in_no_message(monkeypatch, caplog):
    for name, value in handed_over(GIVEN).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MP_AGENT_TOKEN", "two words")
    settings, ignored = take_over()

    assert settings.token.get_secret_value() == ""
    assert ignored == 2, "the handover, and the variable"
    assert "two words" not in caplog.text
