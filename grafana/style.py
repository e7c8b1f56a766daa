"""Colours and texts that several dashboards share."""

from collections.abc import Mapping

from grafana.panel import Step
from grafana.queries import series

RUN_STATE: Mapping[str, tuple[str, str]] = {"1": ("running", "green"), "0": ("ended", "text")}
UP: Mapping[str, tuple[str, str]] = {"1": ("up", "green"), "0": ("down", "red")}
ALERT_STATE: Mapping[str, tuple[str, str]] = {
    "1": ("info", "blue"),
    "2": ("warning", "orange"),
    "3": ("critical", "red"),
}

ANY_IS_BAD = (Step(None, "green"), Step(1, "red"))
ANY_IS_NOTABLE = (Step(None, "green"), Step(1, "orange"))
COVERAGE = (Step(None, "text"), Step(0, "red"), Step(0.999, "orange"), Step(1, "green"))


AGREEMENT: Mapping[str, tuple[str, str]] = {"0": ("equal", "green"), "1": ("different", "red")}

_SEVERITIES = ((3, "critical"), (2, "warning"), (1, "info"))


def detected_by_severity(*, keep: tuple[str, ...]) -> str:
    """Return the conditions that node agents find, as numbers: 3 critical, 2 warning, 1 info."""

    def of(severity: str, rank: int) -> str:
        active = series("mp_agent_condition_active", f'severity="{severity}"')
        return f"max by ({', '.join(keep)}) ({active} == 1) * {rank}"

    return " or ".join(of(severity, rank) for rank, severity in _SEVERITIES)


def conditions_by_severity(selected: str, *, keep: tuple[str, ...] = ("alertname",)) -> str:
    """Return the firing alerts as numbers: 3 critical, 2 warning, 1 info."""
    labels = ", ".join(keep)
    return " or ".join(
        f"max by ({labels}) (ALERTS{{{selected}"
        f'alertname=~"MpAgent.+",alertstate="firing",severity="{severity}"}}) * {rank}'
        for rank, severity in _SEVERITIES
    )
