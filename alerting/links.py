"""Where an alert sends people: its runbook page, the dashboard of its run, the run's tracker."""

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.catalog.metrics.run import POSTMORTEMS, RUNBOOKS

RUNBOOK_BASE = "https://mp-agent.example/runbooks"
"""Stands in the dashboards for the place where runbooks are published, until it is named.

Alerts link to the run's node agent until then, which serves them: a dashboard knows no agent.
"""

ALERT_MARK = "{alert}"
"""Stands for the alert's name, in lower case, in a runbook base whose pages are no `.md` files."""

OF_CLUSTER = "{{ with $labels.cluster }}&var-cluster={{ . | urlquery }}{{ end }}"
"""The part of a dashboard's address that only alerts with this label have."""

_RUN_IDENTITY = ("cluster", "namespace", "job", "run")
_TRACKER = BY_PROMETHEUS_NAME["mp_agent_tracker_info"].prometheus_name
_PAGES = BY_PROMETHEUS_NAME["mp_agent_pages_info"].prometheus_name
_RUN_IN_PATH = '{{ $labels.run | urlquery | reReplaceAll "\\\\+" "%20" }}'
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


def agent_runbook_url(alert: str) -> str:
    """Return a template of Prometheus: an alert's runbook on the run's node agent, or nothing."""
    return _below_agent(f"{RUNBOOKS}/{page_file(alert)}")


def postmortem_url() -> str:
    """Return a template of Prometheus: the run's post-mortem on its node agent, or nothing."""
    return _below_agent(f"{POSTMORTEMS}/{_RUN_IN_PATH}")


def dashboard_url(base: str) -> str:
    """Return, as a template of Prometheus, the address of the run's dashboard."""
    return base.rstrip("/") + _DASHBOARD


def tracker_url() -> str:
    """Return a template of Prometheus: the page of the run in its first tracker, or nothing.

    A run that has ended takes its series along before its alert fires.
    """
    return (
        f'{{{{ range $i, $at := {_addresses(_TRACKER)} | sortByLabel "tracker" }}}}'
        '{{ if not $i }}{{ $at | label "url" }}{{ end }}{{ end }}'
    )


def _below_agent(path: str) -> str:
    return (
        f'{{{{ with {_addresses(_PAGES)} }}}}{{{{ . | first | label "url" }}}}{path}{{{{ end }}}}'
    )


def _addresses(name: str) -> str:
    """Return a query of Prometheus' templates: the run's series whose label `url` is a page."""
    matchers = ",".join(f"{label}=%q" for label in _RUN_IDENTITY)
    arguments = " ".join(f"$labels.{label}" for label in _RUN_IDENTITY)
    series = f'{name}{{url=~\\"https?://.+\\",{matchers}}}'
    return f'printf "last_over_time({series}[<cause_window>])" {arguments} | query'
