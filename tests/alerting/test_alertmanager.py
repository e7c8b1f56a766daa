import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mp_agent.alerting.alertmanager import render_alertmanager

_CONFIGURATION = yaml.safe_load(render_alertmanager("x"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "alertmanager.yaml"
    path.write_text(render_alertmanager("x"))
    return path


def test_amtool_accepts_the_configuration(server: Callable[[str], Path], file: Path) -> None:
    subprocess.run([server("amtool"), "check-config", file], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (("component=mp-agent", "severity=critical"), "on-call"),
        (("component=mp-agent", "severity=warning"), "tickets"),
        (("component=mp-agent", "severity=info"), "tickets"),
        (("component=other", "severity=critical"), "nobody"),
    ],
)
def test_alerts_go_where_component_and_severity_say(
    server: Callable[[str], Path], file: Path, labels: tuple[str, ...], receiver: str
) -> None:
    command = [server("amtool"), "config", "routes", "test", f"--config.file={file}"]
    subprocess.run(
        [*command, f"--verify.receivers={receiver}", *labels], check=True, capture_output=True
    )


def test_a_worse_severity_mutes_the_milder_of_the_same_alert_and_run_only() -> None:
    muted = {
        (rule["source_matchers"][1], rule["target_matchers"][1])
        for rule in _CONFIGURATION["inhibit_rules"]
    }
    assert muted == {
        ('severity="critical"', 'severity=~"warning|info"'),
        ('severity="warning"', 'severity=~"info"'),
    }
    for rule in _CONFIGURATION["inhibit_rules"]:
        assert rule["equal"] == ["alertname", "cluster", "namespace", "job", "run"]


def test_receiver_and_waiting_times_are_the_callers() -> None:
    text = render_alertmanager("x", webhook_url="http://127.0.0.1:7/hook", time_scale=1 / 60)
    configuration = yaml.safe_load(text)
    hooks = [r["webhook_configs"][0]["url"] for r in configuration["receivers"][1:]]
    assert hooks == ["http://127.0.0.1:7/hook"] * 2
    assert configuration["route"]["routes"][0]["group_wait"] == "500ms"
