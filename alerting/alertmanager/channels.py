"""The notification channels, with secrets in files that Alertmanager reads itself."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from mp_agent.alerting.values import Severity
from mp_agent.errors import SettingError


class Channel(Enum):
    """A notification channel."""

    SLACK = "slack"
    PAGERDUTY = "pagerduty"
    EMAIL = "email"
    WEBHOOK = "webhook"
    OPSGENIE = "opsgenie"
    TEAMS = "teams"

    @property
    def configs(self) -> str:
        """Key of its integrations in a receiver."""
        return "msteamsv2_configs" if self is Channel.TEAMS else f"{self.value}_configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What only a site knows: addresses, and where its secrets lie. Wrong ones are refused.

    secrets_dir: holds slack_api_url, pagerduty_routing_key, smtp_password, webhook_url,
    opsgenie_api_key and teams_webhook_url, as far as the channels need them.
    webhook_url: empty for one that is a secret itself.
    email_user: empty for a mail server that asks for no password.
    """

    secrets_dir: str = "/etc/alertmanager/secrets"
    slack_channel: str = "#ml-alerts"
    email_to: str = "ml-on-call@example.com"
    email_from: str = "alertmanager@example.com"
    smarthost: str = "smtp.example.com:587"
    email_user: str = "alertmanager@example.com"
    webhook_url: str = ""

    def __post_init__(self) -> None:
        for name in ("email_to", "email_from"):
            if not all(_ADDRESS.fullmatch(part.strip()) for part in getattr(self, name).split(",")):
                raise SettingError(f"{name} has value {getattr(self, name)!r}; give name@host")
        if not _HOST_AND_PORT.fullmatch(self.smarthost):
            raise SettingError(f"smarthost has value {self.smarthost!r}; give host:port")
        url = urlsplit(self.webhook_url)
        if self.webhook_url and not (url.scheme in ("http", "https") and url.netloc):
            raise SettingError(f"webhook_url has value {self.webhook_url!r}; give an http(s) URL")
        for name in ("secrets_dir", "slack_channel"):
            if not getattr(self, name).strip():
                raise SettingError(f"{name} is empty")


_ADDRESS = re.compile(r"[^@\s,]+@[^@\s,]+")
_HOST_AND_PORT = re.compile(r"[^\s:/]+:\d{1,5}")

_SUITS: Mapping[Channel, frozenset[Severity]] = {
    Channel.SLACK: frozenset(Severity),
    Channel.PAGERDUTY: frozenset({Severity.CRITICAL}),
    Channel.EMAIL: frozenset({Severity.CRITICAL, Severity.WARNING}),
    Channel.WEBHOOK: frozenset(Severity),
    Channel.OPSGENIE: frozenset({Severity.CRITICAL, Severity.WARNING}),
    Channel.TEAMS: frozenset(Severity),
}
"""Warnings are not paged and info alerts are not mailed, unless there is no other channel."""


def integrations(
    severity: Severity, channels: tuple[Channel, ...], site: Site
) -> dict[str, list[dict[str, Any]]]:
    """Return the integrations of the receiver for one severity.

    Of the channels given, those that suit the severity; all of them where none does.
    """
    suiting = tuple(c for c in channels if severity in _SUITS[c]) or channels
    return {c.configs: [_MAKERS[c](site)] for c in suiting}


def _slack(site: Site) -> dict[str, Any]:
    return {
        "api_url_file": f"{site.secrets_dir}/slack_api_url",
        "channel": site.slack_channel,
        "send_resolved": True,
        "color": '{{ template "mp_agent.slack.color" . }}',
        "title": '{{ template "mp_agent.title" . }}',
        "title_link": '{{ template "mp_agent.link" . }}',
        "fallback": '{{ template "mp_agent.title" . }}',
        "text": '{{ template "mp_agent.slack.text" . }}',
        "mrkdwn_in": ["text"],
    }


def _pagerduty(site: Site) -> dict[str, Any]:
    return {
        "routing_key_file": f"{site.secrets_dir}/pagerduty_routing_key",
        "send_resolved": True,
        "severity": '{{ template "mp_agent.severity" . }}',
        "description": '{{ template "mp_agent.title" . }}',
        "class": "{{ .CommonLabels.alertname }}",
        "component": "{{ .CommonLabels.run }}",
        "group": "{{ .CommonLabels.cluster }}",
        "client": "mp_agent",
        "client_url": '{{ template "mp_agent.link" . }}',
        "details": {
            "firing": '{{ template "mp_agent.text.firing" . }}',
            "resolved": '{{ template "mp_agent.text.resolved" . }}',
            "num_firing": "{{ .Alerts.Firing | len }}",
            "num_resolved": "{{ .Alerts.Resolved | len }}",
        },
    }


def _email(site: Site) -> dict[str, Any]:
    password = {
        "auth_username": site.email_user,
        "auth_password_file": f"{site.secrets_dir}/smtp_password",
    }
    return {
        "to": site.email_to,
        "from": site.email_from,
        "smarthost": site.smarthost,
        **(password if site.email_user else {}),
        "send_resolved": True,
        "headers": {"Subject": '{{ template "mp_agent.title" . }}'},
        "html": '{{ template "mp_agent.email.html" . }}',
        "text": '{{ template "mp_agent.text" . }}',
    }


def _webhook(site: Site) -> dict[str, Any]:
    if site.webhook_url:
        return {"url": site.webhook_url}
    return {"url_file": f"{site.secrets_dir}/webhook_url"}


def _opsgenie(site: Site) -> dict[str, Any]:
    return {
        "api_key_file": f"{site.secrets_dir}/opsgenie_api_key",
        "send_resolved": True,
        "message": '{{ template "mp_agent.title" . }}',
        "description": '{{ template "mp_agent.text" . }}',
        "source": '{{ template "mp_agent.link" . }}',
        "entity": "{{ .CommonLabels.run }}",
        "priority": '{{ template "mp_agent.opsgenie.priority" . }}',
        "tags": '{{ template "mp_agent.severity" . }},{{ .CommonLabels.component }}',
        "details": {
            "num_firing": "{{ .Alerts.Firing | len }}",
            "num_resolved": "{{ .Alerts.Resolved | len }}",
        },
    }


def _teams(site: Site) -> dict[str, Any]:
    return {
        "webhook_url_file": f"{site.secrets_dir}/teams_webhook_url",
        "send_resolved": True,
        "title": '{{ template "mp_agent.title" . }}',
        "text": '{{ template "mp_agent.text" . }}',
    }


_MAKERS: Mapping[Channel, Callable[[Site], dict[str, Any]]] = {
    Channel.SLACK: _slack,
    Channel.PAGERDUTY: _pagerduty,
    Channel.EMAIL: _email,
    Channel.WEBHOOK: _webhook,
    Channel.OPSGENIE: _opsgenie,
    Channel.TEAMS: _teams,
}
