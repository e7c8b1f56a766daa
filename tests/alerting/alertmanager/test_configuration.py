"""The configuration, as amtool and plain reading see it."""

import subprocess
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.alerting.alertmanager import (
    MESSAGES,
    MESSAGES_FILE,
    USUAL_CHANNELS,
    render_alertmanager,
)
from mp_agent.alerting.alertmanager.channels import Channel, Site
from mp_agent.alerting.values import Severity
from mp_agent.errors import SettingError
from tests.subtests import each

_SETS = [
    channels
    for channels in chain.from_iterable(combinations(Channel, n) for n in (1, 2, len(Channel)))
    if channels != (Channel.WEBHOOK,)
]


def _written(directory: Path, **arguments: Any) -> Path:
    (directory / MESSAGES_FILE).write_text(MESSAGES)
    path = directory / "alertmanager.yaml"
    path.write_text(render_alertmanager("x", **arguments))
    return path


def _receivers(**arguments: Any) -> dict[str, dict[str, Any]]:
    document = yaml.safe_load(render_alertmanager("x", **arguments))
    return {receiver["name"]: receiver for receiver in document["receivers"]}


def test_amtool_accepts_the_configuration_of_every_set_of_channels_with_its_messages(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    for channels in _SETS:
        path = _written(tmp_path, channels=channels)
        done = subprocess.run(
            [server("amtool"), "check-config", path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "1 templates" in done.stdout


def test_a_webhook_alone_needs_no_messages(server: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "alertmanager.yaml"
    path.write_text(render_alertmanager("x", webhook_url="http://127.0.0.1:7/"))
    subprocess.run([server("amtool"), "check-config", path], check=True, capture_output=True)
    assert "templates" not in yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (("component=mp-agent", "severity=critical"), "on-call"),
        (("component=mp-agent", "severity=warning"), "tickets"),
        (("component=mp-agent", "severity=info"), "hints"),
        (("component=mp-agent",), "tickets"),
        (("component=mp-agent", "severity=unheard"), "tickets"),
        *((("component=other", f"severity={severity.value}"), "nobody") for severity in Severity),
        (("severity=critical",), "nobody"),
    ],
)
def test_alerts_go_where_component_and_severity_say(
    server: Callable[[str], Path], tmp_path: Path, labels: tuple[str, ...], receiver: str
) -> None:
    path = _written(tmp_path, channels=USUAL_CHANNELS)
    command = [str(server("amtool")), "config", "routes", "test", f"--config.file={path}"]
    subprocess.run(
        [*command, f"--verify.receivers={receiver}", *labels], check=True, capture_output=True
    )


def test_no_one_is_paged_for_a_warning_or_mailed_a_hint() -> None:
    receivers = _receivers(channels=tuple(Channel))
    assert {name: set(receiver) - {"name"} for name, receiver in receivers.items()} == {
        "nobody": set(),
        "on-call": {channel.configs for channel in Channel},
        "tickets": {channel.configs for channel in Channel} - {"pagerduty_configs"},
        "hints": {"slack_configs", "webhook_configs", "msteamsv2_configs"},
    }


@each("channels", _SETS)
def test_no_severity_goes_nowhere(channels: tuple[Channel, ...]) -> None:
    receivers = _receivers(channels=channels)
    assert all(len(receivers[name]) > 1 for name in ("on-call", "tickets", "hints"))


def test_no_secret_is_in_the_file() -> None:
    text = render_alertmanager("x", channels=tuple(Channel), site=Site(secrets_dir="/s"))
    for key in ("api_url", "api_key", "routing_key", "auth_password", "url", "password"):
        assert f" {key}:" not in text and f"webhook_{key}:" not in text
    for path in (
        "slack_api_url",
        "pagerduty_routing_key",
        "smtp_password",
        "webhook_url",
        "opsgenie_api_key",
        "teams_webhook_url",
    ):
        assert f": /s/{path}\n" in text


def test_a_mail_server_without_password_is_asked_with_none() -> None:
    (mail,) = _receivers(channels=(Channel.EMAIL,), site=Site(email_user=""))["on-call"][
        "email_configs"
    ]
    assert not any(key.startswith("auth") for key in mail)


def test_the_time_scale_multiplies_every_wait() -> None:
    text = render_alertmanager("x", time_scale=1 / 60)
    route = yaml.safe_load(text)["route"]["routes"][0]
    waits = {key: value for key, value in route.items() if key.endswith(("wait", "interval"))}
    assert waits == {"group_wait": "500ms", "group_interval": "5s", "repeat_interval": "4m"}
    critical, info = route["routes"]
    assert (critical["group_interval"], info["group_wait"]) == ("1s", "5s")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"channels": ()}, "channels is empty"),
        ({"time_scale": 0}, "time scale has value 0"),
        ({"time_scale": float("nan")}, "time scale has value nan"),
    ],
)
def test_what_would_notify_no_one_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        render_alertmanager("x", **arguments)


@each(
    ("addresses", "problem"),
    [
        ({"email_to": "someone"}, "email_to has value 'someone'"),
        ({"email_from": "a@b, c"}, "email_from has value 'a@b, c'"),
        ({"smarthost": "mail"}, "smarthost has value 'mail'"),
        ({"webhook_url": "ftp://x"}, "webhook_url has value 'ftp://x'"),
        ({"slack_channel": " "}, "slack_channel is empty"),
        ({"secrets_dir": ""}, "secrets_dir is empty"),
    ],
)
def test_a_wrong_address_is_refused_by_name(addresses: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        Site(**addresses)
