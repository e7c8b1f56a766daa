"""Where an alert sends people: its runbook page, the dashboard of its run, the run's tracker."""

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME

RUNBOOK_BASE = "https://mp-agent.example/runbooks"
"""Stands in the dashboards for the place where runbooks are published, until it is named.

Alerts have no such link until then: a link must not point to a host that does not exist.
"""

ALERT_MARK = "{alert}"
"""Stands for the alert's name, in lower case, in a runbook base whose pages are no `.md` files."""

OF_CLUSTER = "{{ with $labels.cluster }}&var-cluster={{ . | urlquery }}{{ end }}"
"""The part of a dashboard's address that only alerts with this label have."""

_RUN_IDENTITY = ("cluster", "namespace", "job", "run")
_TRACKER = BY_PROMETHEUS_NAME["mp_agent_tracker_info"].prometheus_name
_DASHBOARD = (
    "/d/mp-agent-run/?"
    + "&".join(
        f"var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in ("namespace", "job", "run")
    )
    + OF_CLUSTER
)


def page_file(alert: str) -> str:
    """Return the name of the file that is an alert's runbook page."""
    return f"{alert.lower()}.md"


def runbook_url(base: str, alert: str) -> str:
    """Return the address of an alert's runbook: `{alert}` filled in, else its file below `base`.

    The address of the folder in a repository can thus be the base.
    """
    if ALERT_MARK in base:
        return base.replace(ALERT_MARK, alert.lower())
    return f"{base.rstrip('/')}/{page_file(alert)}"


def dashboard_url(base: str) -> str:
    """Return, as a template of Prometheus, the address of the run's dashboard."""
    return base.rstrip("/") + _DASHBOARD


def tracker_url() -> str:
    """Return a template of Prometheus: the page of the run in its first tracker, or nothing.

    A run that has ended takes its series along before its alert fires.
    """
    matchers = ",".join(f"{label}=%q" for label in _RUN_IDENTITY)
    arguments = " ".join(f"$labels.{label}" for label in _RUN_IDENTITY)
    pages = f'{_TRACKER}{{url=~\\"https?://.+\\",{matchers}}}'
    query = f'printf "last_over_time({pages}[<cause_window>])" {arguments} | query'
    return (
        f'{{{{ range $i, $at := {query} | sortByLabel "tracker" }}}}'
        '{{ if not $i }}{{ $at | label "url" }}{{ end }}{{ end }}'
    )
