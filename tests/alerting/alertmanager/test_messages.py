"""A real Alertmanager with the shipped configuration: who hears of what, and in what words."""

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from mp_agent.alerting.alertmanager import (
    MESSAGES,
    MESSAGES_FILE,
    render_alertmanager,
)
from mp_agent.alerting.alertmanager.channels import Channel, Site
from tests.alerting.alertmanager.inboxes import Inboxes, inboxes
from tests.waiting import wait_until
from tools.servers.running import alertmanager, read_json

pytestmark = pytest.mark.e2e

_TIME_SCALE = 1 / 60
_RUNBOOKS = "https://books.example/runbooks"


@dataclass(frozen=True, slots=True)
class Desk:
    """A running Alertmanager and what it sends to."""

    url: str
    inbox: Inboxes

    def send(self, *alerts: dict[str, Any]) -> None:
        body = json.dumps(alerts).encode()
        request = urllib.request.Request(
            f"{self.url}/api/v2/alerts", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def state(self, **labels: str) -> str:
        """Return whether the alert with these labels is active or suppressed, once it is known."""

        def known() -> str:
            for alert in read_json(f"{self.url}/api/v2/alerts"):
                state = alert["status"]["state"]
                if labels.items() <= alert["labels"].items() and state != "unprocessed":
                    return str(state)
            return ""

        return wait_until(known, what=f"the state of {labels}")

    def await_muted(self, **labels: str) -> None:
        """Wait until the alert with these labels is muted, a little after the one that does it."""
        wait_until(lambda: self.state(**labels) == "suppressed", what=f"{labels} to be muted")

    def webhook_messages(self, run: str) -> list[dict[str, Any]]:
        return [m for m in self.inbox.at("/webhook") if m["commonLabels"].get("run") == run]


@pytest.fixture(scope="module")
def desk(server: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[Desk]:
    directory = tmp_path_factory.mktemp("desk")
    with inboxes() as inbox:
        secrets = {
            "slack_api_url": f"{inbox.http_url}/slack",
            "pagerduty_routing_key": "f" * 32,
            "webhook_url": f"{inbox.http_url}/webhook",
            "opsgenie_api_key": "an-api-key",
            "teams_webhook_url": f"{inbox.http_url}/teams",
        }
        for name, secret in secrets.items():
            (directory / name).write_text(secret)
        (directory / MESSAGES_FILE).write_text(MESSAGES)
        site = Site(secrets_dir=str(directory), smarthost=inbox.smarthost, email_user="")
        text = render_alertmanager("x", channels=tuple(Channel), site=site, time_scale=_TIME_SCALE)
        with alertmanager(server("alertmanager"), directory, _here(text, inbox)) as url:
            yield Desk(url, inbox)


def _here(configuration: str, inbox: Inboxes) -> str:
    """Return the configuration with what leads a test's messages to the stand-ins, and no more."""
    document = yaml.safe_load(configuration)
    for receiver in document["receivers"]:
        for pager in receiver.get("pagerduty_configs", ()):
            pager["url"] = f"{inbox.http_url}/pagerduty"
        for pager in receiver.get("opsgenie_configs", ()):
            pager["api_url"] = f"{inbox.http_url}/opsgenie/"
        for mail in receiver.get("email_configs", ()):
            mail["require_tls"] = False
    return yaml.safe_dump(document)


def _alert(name: str, severity: str, run: str | None, **parts: Any) -> dict[str, Any]:
    labels = {"alertname": name, "severity": severity, "component": "mp-agent", "job": "train"}
    labels |= {"run": run} if run is not None else {}
    return {
        "labels": labels | parts.pop("labels", {}),
        "annotations": {
            "summary": f"{name} in short.",
            "description": f"{name} in full.",
            "remedy": "Do this. Do that.",
            "runbook_url": f"{_RUNBOOKS}/{name.lower()}",
            **parts.pop("annotations", {}),
        },
        **parts,
    }


def _ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


def test_alerts_of_one_run_come_in_one_message_and_those_of_another_in_another(desk: Desk) -> None:
    desk.send(
        _alert("MpAgentLossNonFinite", "critical", "grouped"),
        _alert("MpAgentNonFiniteUpdate", "critical", "grouped"),
        _alert("MpAgentNonFiniteUpdate", "critical", "other"),
        _alert("MpAgentNonFiniteUpdate", "critical", "grouped", labels={"cluster": "west"}),
    )
    wait_until(lambda: len(desk.webhook_messages("grouped")) > 1, what="the group's messages")
    wait_until(lambda: desk.webhook_messages("other"), what="the other run's message")
    names = sorted(
        [alert["labels"]["alertname"] for alert in message["alerts"]]
        for message in desk.webhook_messages("grouped")
    )
    assert sorted(map(sorted, names)) == [
        ["MpAgentLossNonFinite", "MpAgentNonFiniteUpdate"],
        ["MpAgentNonFiniteUpdate"],
    ]
    assert len(desk.webhook_messages("other")[0]["alerts"]) == 1


def test_a_worse_severity_mutes_the_milder_of_the_same_alert_and_run_only(desk: Desk) -> None:
    desk.send(_alert("MpAgentGradientExplosion", "critical", "muting"))
    desk.send(
        _alert("MpAgentGradientExplosion", "warning", "muting"),
        _alert("MpAgentGradientExplosion", "info", "muting"),
        _alert("MpAgentGradientExplosion", "warning", "calm"),
        _alert("MpAgentRankStraggler", "warning", "muting"),
        _alert("MpAgentGradientExplosion", "warning", "muting", labels={"namespace": "b"}),
    )
    name = {"alertname": "MpAgentGradientExplosion"}
    desk.await_muted(**name, run="muting", severity="info")
    assert desk.state(**name, run="calm", severity="warning") == "active"
    assert desk.state(alertname="MpAgentRankStraggler", run="muting") == "active"
    assert desk.state(**name, run="muting", namespace="b") == "active"
    wait_until(lambda: desk.webhook_messages("calm"), what="the calm run's ticket")
    assert not any(
        alert["labels"]["severity"] == "warning"
        and alert["labels"]["alertname"] == name["alertname"]
        for message in desk.webhook_messages("muting")
        for alert in message["alerts"]
        if "namespace" not in alert["labels"]
    )


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("MpAgentRunVanished", "warning"),
        ("MpAgentRunStalled", "warning"),
        ("MpAgentRunStalled", "critical"),
        ("MpAgentRunFailed", "critical"),
    ],
)
def test_a_run_that_ended_or_stands_mutes_its_lesser_alerts(
    desk: Desk, name: str, severity: str
) -> None:
    run = f"{name}-{severity}"
    desk.send(_alert(name, severity, run, labels={"reason": "killed"}))
    desk.send(
        _alert("MpAgentRankStraggler", "warning", run),
        _alert("MpAgentGradientVanishing", "info", run),
        _alert("MpAgentNonFiniteUpdate", "critical", run),
        _alert("MpAgentRankStraggler", "warning", f"not-{run}"),
        _alert("MpAgentTelemetryDegraded", "warning", None, labels={"pod": run}),
    )
    desk.await_muted(alertname="MpAgentRankStraggler", run=run)
    desk.await_muted(alertname="MpAgentGradientVanishing", run=run)
    assert desk.state(alertname="MpAgentNonFiniteUpdate", run=run) == "active"
    assert desk.state(alertname="MpAgentRankStraggler", run=f"not-{run}") == "active"
    assert desk.state(alertname="MpAgentTelemetryDegraded", pod=run) == "active"
    assert desk.state(alertname=name, run=run, severity=severity) == "active"


def test_runs_of_one_name_in_two_namespaces_have_nothing_to_do_with_each_other(desk: Desk) -> None:
    of_a, of_b = ({"namespace": name} for name in ("team-a", "team-b"))
    desk.send(
        _alert("MpAgentRunFailed", "critical", "baseline", labels=of_a),
        _alert("MpAgentLossSpike", "critical", "baseline", labels=of_a),
    )
    desk.send(
        _alert("MpAgentLossSpike", "warning", "baseline", labels=of_b),
        _alert("MpAgentRankStraggler", "warning", "baseline", labels=of_b),
        _alert("MpAgentRankStraggler", "warning", "baseline", labels=of_a),
    )
    straggler = {"alertname": "MpAgentRankStraggler", "run": "baseline"}
    desk.await_muted(**straggler, **of_a)
    assert desk.state(**straggler, **of_b) == "active"
    assert desk.state(alertname="MpAgentLossSpike", severity="warning", **of_b) == "active"


def test_a_silence_names_a_run_with_blanks_and_a_missing_link_is_left_out(
    desk: Desk,
) -> None:
    alert = _alert("MpAgentRunFailed", "critical", "base line +2")
    del alert["annotations"]["runbook_url"]
    desk.send(alert)
    message = _first(lambda: _of_run(desk.inbox.at("/slack"), "base line +2"), "Slack")
    (attachment,) = message["attachments"]
    *_, link = attachment["text"].splitlines()
    assert "+" not in link
    assert 'run="base line +2"}' in unquote(link)
    assert "Runbook" not in attachment["text"]
    mail = _first(
        lambda: [m for m in desk.inbox.mails if "base line +2" in str(m["Subject"])], "the mail"
    )
    page = mail.get_body(("html",)).get_content()
    (href,) = re.findall(r'href="([^"]*/silences/new[^"]*)"', page)
    assert "+" not in unescape(href) and "%20" in href
    assert 'run="base line +2"}' in unquote(unescape(href))


_FULL = _alert(
    "MpAgentRankNonFinite",
    "critical",
    "llama-7b",
    labels={"rank": "3", "layer": "blocks.7.mlp", "cluster": "west", "namespace": "ml"},
    annotations={
        "description": "Rank 3 of run llama-7b saw <NaN> & Inf first.",
        "remedy": "Look at rank 3's data. Then at its GPU.",
        "step": "1234",
        "dashboard_url": "https://grafana.example/d/mp-agent-run?var-run=llama-7b",
        "tracker_url": "https://wandb.example/team/runs/1a2b",
    },
    startsAt="2026-01-02T03:04:05Z",
)
_LINES = [
    "CRITICAL MpAgentRankNonFinite: MpAgentRankNonFinite in short.",
    "Rank 3 of run llama-7b saw <NaN> & Inf first.",
    "Where: cluster west, namespace ml, run llama-7b, rank 3, layer blocks.7.mlp, "
    "since step 1234, 2026-01-02 03:04:05 UTC",
    "What to do: Look at rank 3's data. Then at its GPU.",
    f"Runbook: {_RUNBOOKS}/mpagentranknonfinite",
    "Dashboard: https://grafana.example/d/mp-agent-run?var-run=llama-7b",
    "Tracker: https://wandb.example/team/runs/1a2b",
]


@pytest.fixture(scope="module")
def notified(desk: Desk) -> Desk:
    """The desk after one critical alert with every part was sent by every channel."""
    desk.send(_FULL)
    wait_until(lambda: desk.webhook_messages("llama-7b"), what="the webhook")
    return desk


def _first(messages: Callable[[], list[Any]], what: str) -> Any:
    return wait_until(messages, what=what)[0]


def test_slack_says_what_where_since_when_what_to_do_and_where_to_read_on(notified: Desk) -> None:
    message = _first(lambda: _of_run(notified.inbox.at("/slack"), "llama-7b"), "Slack")
    (attachment,) = message["attachments"]
    assert message["channel"] == "#ml-alerts"
    assert attachment["color"] == "danger"
    assert attachment["title"] == "[CRITICAL] run llama-7b: MpAgentRankNonFinite in short."
    assert attachment["title_link"].startswith("https://grafana.example/d/mp-agent-run")
    lines = attachment["text"].splitlines()
    assert lines[:5] == [
        "*CRITICAL MpAgentRankNonFinite*: MpAgentRankNonFinite in short.",
        "Rank 3 of run llama-7b saw &lt;NaN&gt; &amp; Inf first.",
        "*Where:* cluster west, namespace ml, run llama-7b, rank 3, layer blocks.7.mlp, "
        "since step 1234, 2026-01-02 03:04:05 UTC",
        "*What to do:* Look at rank 3's data. Then at its GPU.",
        f"<{_RUNBOOKS}/mpagentranknonfinite|Runbook> "
        "<https://grafana.example/d/mp-agent-run?var-run=llama-7b|Dashboard> "
        "<https://wandb.example/team/runs/1a2b|Tracker>",
    ]
    link = lines[-1]
    # Alertmanager's page takes a plus literally, so that a blank has to be %20.
    assert "+" not in link
    assert 'cluster="west",namespace="ml",run="llama-7b"}' in unquote(link)
    assert link.endswith("|Silence this run>")
    assert "\n\n\n" not in attachment["text"]


def test_slack_takes_no_name_for_a_mention_or_a_link(notified: Desk) -> None:
    names = {"namespace": "ml", "layer": "<https://x.example|Dashboard>"}
    alert = _alert("MpAgentRankNonFinite", "critical", "<!here>", labels=names, startsAt=_ago(60))
    notified.send(alert)

    def attachments() -> list[Any]:
        sent = [one for message in notified.inbox.at("/slack") for one in message["attachments"]]
        return [one for one in sent if "!here" in one["title"]]

    text = _first(attachments, "Slack")["text"]
    assert "run &lt;!here&gt;, layer &lt;https://x.example|Dashboard&gt;, since" in text
    assert "<!here>" not in text


def test_pagerduty_is_sent_severity_run_and_the_whole_text(notified: Desk) -> None:
    event = _first(lambda: _of_run(notified.inbox.at("/pagerduty"), "llama-7b"), "PagerDuty")
    payload = event["payload"]
    assert event["routing_key"] == "f" * 32
    assert event["client_url"].startswith("https://grafana.example/d/mp-agent-run")
    assert payload["summary"] == "[CRITICAL] run llama-7b: MpAgentRankNonFinite in short."
    assert payload["severity"] == "critical"
    assert (payload["class"], payload["component"], payload["group"]) == (
        "MpAgentRankNonFinite",
        "llama-7b",
        "west",
    )
    assert payload["custom_details"]["firing"].splitlines()[: len(_LINES)] == _LINES


def test_opsgenie_gets_priority_run_and_the_whole_text(notified: Desk) -> None:
    alert = _first(
        lambda: _of_run(notified.inbox.at("/opsgenie/v2/alerts"), "llama-7b"),
        "the alert in Opsgenie",
    )
    assert alert["message"] == "[CRITICAL] run llama-7b: MpAgentRankNonFinite in short."
    assert (alert["priority"], alert["entity"]) == ("P1", "llama-7b")
    assert alert["tags"] == ["critical", "mp-agent"]
    assert alert["source"].startswith("https://grafana.example/d/mp-agent-run")
    assert alert["description"].splitlines()[: len(_LINES)] == _LINES


def test_teams_gets_a_card_with_the_whole_text(notified: Desk) -> None:
    message = _first(lambda: _of_run(notified.inbox.at("/teams"), "llama-7b"), "the card in Teams")
    (attachment,) = message["attachments"]
    title, text = (block["text"] for block in attachment["content"]["body"])
    assert title == "[CRITICAL] run llama-7b: MpAgentRankNonFinite in short."
    assert text.splitlines()[: len(_LINES)] == _LINES


def test_the_mail_says_the_same_as_text_and_as_html(notified: Desk) -> None:
    mail = _first(
        lambda: [m for m in notified.inbox.mails if "llama-7b" in str(m["Subject"])], "the mail"
    )
    assert mail["Subject"] == "[CRITICAL] run llama-7b: MpAgentRankNonFinite in short."
    text = mail.get_body(("plain",)).get_content()
    assert text.splitlines()[: len(_LINES)] == _LINES
    html = mail.get_body(("html",)).get_content()
    for part in (
        "Rank 3 of run llama-7b saw &lt;NaN&gt; &amp; Inf first.",
        "rank 3, layer blocks.7.mlp, since step 1234, 2026-01-02 03:04:05 UTC",
        "Look at rank 3&#39;s data. Then at its GPU.",
        f'href="{_RUNBOOKS}/mpagentranknonfinite"',
        'href="https://grafana.example/d/mp-agent-run?var-run=llama-7b"',
        'href="https://wandb.example/team/runs/1a2b"',
    ):
        assert part in html
    assert "<no value>" not in html + text


def test_a_name_with_line_breaks_adds_no_header_to_a_mail(desk: Desk) -> None:
    name = "broken\r\nBcc: all@example.com\n\nlines"
    summary = {"summary": f"{name} in short."}
    desk.send(_alert("MpAgentNonFiniteUpdate", "critical", name, annotations=summary))
    mail = _first(lambda: [m for m in desk.inbox.mails if "broken" in str(m["Subject"])], "mail")
    once = "broken Bcc: all@example.com lines"
    assert "Bcc" not in mail and mail["Subject"] == f"[CRITICAL] run {once}: {once} in short."


def test_the_end_of_an_alert_is_reported_too(notified: Desk) -> None:
    brief = _alert("MpAgentRunStalled", "critical", "brief", startsAt=_ago(60))
    notified.send(brief)
    wait_until(lambda: notified.webhook_messages("brief"), what="the alert")
    notified.send({**brief, "endsAt": _ago(0)})
    ends = wait_until(
        lambda: [m for m in _of_run(notified.inbox.at("/slack"), "brief") if _color(m) == "good"],
        what="the end in Slack",
    )
    (attachment,) = ends[0]["attachments"]
    assert attachment["title"] == "[RESOLVED] run brief: MpAgentRunStalled in short."
    assert ":white_check_mark: MpAgentRunStalled (critical) is over." in attachment["text"]
    assert "Silence" not in attachment["text"]


def test_parts_that_an_alert_does_not_name_leave_no_trace(notified: Desk) -> None:
    """No rank, layer, step, cluster or dashboard: no empty words for them."""
    since = _ago(0)  # what began longer ago than `group_wait` is sent before the rest arrives
    notified.send(
        _alert("MpAgentOverflowRatioHigh", "warning", "plain", startsAt=since),
        _alert("MpAgentLossSpike", "warning", "plain", startsAt=since),
    )
    mail = _first(
        lambda: [m for m in notified.inbox.mails if "run plain" in str(m["Subject"])], "the mail"
    )
    assert str(mail["Subject"]).startswith("[WARNING] run plain: ")
    assert str(mail["Subject"]).endswith(" in short. (2 alerts)")
    text = mail.get_body(("plain",)).get_content()
    assert f"Where: run plain, since {since[:10]} {since[11:19]} UTC" in text
    assert "Tracker" not in text + mail.get_body(("html",)).get_content()
    assert "Dashboard" not in text + mail.get_body(("html",)).get_content()
    message = _first(lambda: _of_run(notified.inbox.at("/slack"), "plain"), "Slack")
    assert _color(message) == "warning"


def test_an_alert_of_no_run_speaks_of_none(notified: Desk) -> None:
    place = {"namespace": "lone"}
    notified.send(
        _alert("MpAgentTelemetryDegraded", "warning", None, labels=place, startsAt=_ago(60))
    )

    def mails() -> list[Any]:
        bodies = [(m, m.get_body(("plain",))) for m in notified.inbox.mails]
        return [
            mail
            for mail, body in bodies
            if body is not None and "Where: namespace lone, since 2" in body.get_content()
        ]

    mail = _first(mails, "the mail")
    assert mail["Subject"] == "[WARNING] MpAgentTelemetryDegraded in short."
    text, html = (mail.get_body((kind,)).get_content() for kind in ("plain", "html"))
    assert "\nSilence: http" in text
    assert "<b>Where:</b> namespace lone, since 2" in html
    assert ">Silence</a>" in html


def test_a_hint_goes_neither_to_the_pager_nor_to_the_mailbox(notified: Desk) -> None:
    notified.send(_alert("MpAgentGradientVanishing", "info", "hinted"))
    wait_until(lambda: notified.webhook_messages("hinted"), seconds=20, what="the hint")
    message = _first(lambda: _of_run(notified.inbox.at("/slack"), "hinted"), "Slack")
    assert _color(message) == "#439FE0"
    assert not _of_run(notified.inbox.at("/pagerduty"), "hinted")
    assert not any("run hinted" in str(mail["Subject"]) for mail in notified.inbox.mails)


def _of_run(messages: list[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    return [message for message in messages if f" run {run}:" in json.dumps(message)]


def _color(message: dict[str, Any]) -> str:
    return str(message["attachments"][0]["color"])
