"""The AlertmanagerConfig tells apart what the shipped Alertmanager configuration tells apart."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mp_agent.alerting.alertmanager import MESSAGES, MESSAGES_FILE
from tests.helm.rendering import objects, objects_of, of_kind

OPERATOR = {"assumeApiVersions": ["monitoring.coreos.com/v1alpha1"]}
SLACK = {"name": "slack", "key": "url", "channel": "#training"}
PAGERDUTY = {"name": "pagerduty", "key": "routing-key"}


def receivers(**channels: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the channels of each receiver."""
    values = {**OPERATOR, "alertmanagerConfig": {"enabled": True, **channels}}
    (config,) = of_kind(objects(values), "AlertmanagerConfig")
    return {one["name"]: one.keys() - {"name"} for one in config["spec"]["receivers"]}


def test_only_critical_alerts_page_where_there_is_another_channel() -> None:
    assert receivers(slack=SLACK, pagerduty=PAGERDUTY) == {
        "on-call": {"slackConfigs", "pagerdutyConfigs"},
        "tickets": {"slackConfigs"},
        "hints": {"slackConfigs"},
    }
    assert set().union(*receivers(pagerduty=PAGERDUTY).values()) == {"pagerdutyConfigs"}


def test_every_route_leads_to_a_receiver() -> None:
    (config,) = of_kind(objects_of("everything"), "AlertmanagerConfig")
    route = config["spec"]["route"]
    named = {route["receiver"], *(child["receiver"] for child in route["routes"])}
    assert named == {one["name"] for one in config["spec"]["receivers"]}


def alert(name: str, status: str, severity: str, **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": name, "severity": severity, "run": "llama", **labels},
        "annotations": {
            "summary": f"The summary of {name}.",
            "description": "Loss <nan> & more.",
            "remedy": "Lower the rate.",
            "runbook_url": f"https://books.example/{name.lower()}.md",
            "dashboard_url": "https://grafana.example/d/mp-agent-run",
            "step": "1234",
        },
        "startsAt": "2026-01-02T03:04:05Z",
        "endsAt": "2026-01-02T04:04:05Z" if status == "resolved" else "0001-01-01T00:00:00Z",
    }


@pytest.mark.e2e
def test_messages_are_word_for_word_those_of_the_shipped_templates(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    alerts = [
        alert("MpAgentLossSpike", "firing", "warning", layer="blocks.7"),
        alert("MpAgentRunFailed", "firing", "critical", rank="3", cluster="west"),
        alert("MpAgentLossNonFinite", "resolved", "critical"),
    ]
    data = {
        "receiver": "x",
        "status": "firing",
        "alerts": alerts,
        "groupLabels": {"run": "llama"},
        "commonLabels": {"run": "llama"},
        "commonAnnotations": {},
        "externalURL": "https://alertmanager.example",
    }
    (tmp_path / "data.json").write_text(json.dumps(data))
    (tmp_path / MESSAGES_FILE).write_text(MESSAGES)
    amtool = server("amtool")

    def render(text: str) -> str:
        options = {"glob": tmp_path / MESSAGES_FILE, "data": tmp_path / "data.json", "text": text}
        arguments = [f"--template.{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            [amtool, "template", "render", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (config,) = of_kind(objects_of("everything"), "AlertmanagerConfig")
    on_call = next(one for one in config["spec"]["receivers"] if one["name"] == "on-call")
    (slack,), (pagerduty,) = on_call["slackConfigs"], on_call["pagerdutyConfigs"]
    details = {one["key"]: one["value"] for one in pagerduty["details"]}
    assert "(2 alerts)" in render(slack["title"])
    for text, name in (
        (slack["title"], "mp_agent.title"),
        (slack["text"], "mp_agent.slack.text"),
        (slack["color"], "mp_agent.slack.color"),
        (details["firing"], "mp_agent.text.firing"),
        (details["resolved"], "mp_agent.text.resolved"),
    ):
        assert render(text) == render(f'{{{{ template "{name}" . }}}}'), name
