"""Colours and texts that several dashboards share."""

from collections.abc import Mapping

from grafana.panel import Step

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


def conditions_by_severity(selected: str, *, keep: tuple[str, ...] = ("alertname",)) -> str:
    """Return the firing alerts as numbers: 3 critical, 2 warning, 1 info."""
    labels = ", ".join(keep)
    return " or ".join(
        f"max by ({labels}) (ALERTS{{{selected}"
        f'alertname=~"MpAgent.+",alertstate="firing",severity="{severity}"}}) * {rank}'
        for rank, severity in ((3, "critical"), (2, "warning"), (1, "info"))
    )
