"""Colours and texts that several dashboards share."""

from collections.abc import Mapping

from grafana.panel import Step, above, below, between, for_cells
from grafana.queries import RUN, SELECTED, series

RUN_STATE: Mapping[str, tuple[str, str]] = {"1": ("running", "green"), "0": ("ended", "text")}
ENDS: Mapping[str, tuple[str, str]] = {
    "completed": ("completed", "text"),
    "failed": ("failed", "red"),
    "killed": ("killed", "red"),
    "unknown": ("unknown", "orange"),
}
ALERT_STATE: Mapping[str, tuple[str, str]] = {
    "1": ("info", "blue"),
    "2": ("warning", "orange"),
    "3": ("critical", "red"),
}
WORST: Mapping[str, tuple[str, str]] = {"0": ("–", "text"), **ALERT_STATE}
"""The same where 0 stands for none."""
URGENCY: Mapping[str, tuple[str, str]] = {
    "-1": ("ended", "text"),
    "0": ("healthy", "green"),
    "1": ("info", "blue"),
    "2": ("silent", "orange"),
    "3": ("warning", "orange"),
    "4": ("critical", "red"),
}
VERDICT: Mapping[str, tuple[str, str]] = {
    "0": ("healthy", "green"),
    **{number: (f"{text}: look below", color) for number, (text, color) in ALERT_STATE.items()},
}
LOSS_LEVEL: Mapping[str, tuple[str, str]] = {
    "0": ("usual", "green"),
    "1": ("above usual", "orange"),
    "2": ("lost", "red"),
}
LOSS_IS_LINEAR_TO = 0.01
"""Below it an axis of losses is linear, so that it has a place for 0 and for negative ones."""
SEVERITIES: Mapping[str, tuple[str, str]] = {
    text: (text, color) for text, color in ALERT_STATE.values()
}

ANY_IS_BAD = (Step(None, "green"), Step(1, "red"))
ANY_IS_NOTABLE = (Step(None, "green"), Step(1, "orange"))
COVERAGE = (Step(None, "text"), Step(0, "orange"), Step(1, "green"))

# Colours of limits are those of the alerts' severities: red critical, orange warning, blue info.
GRADIENT_NORM_LINES = between(
    below(grad_norm_vanished="red", grad_norm_very_low="orange", grad_norm_low="blue"),
    above(grad_norm_high="orange", grad_norm_extreme="red"),
)
GRADIENT_NORM = for_cells(GRADIENT_NORM_LINES)
NORM_REACHES = ("grad_norm_very_low", "grad_norm_extreme")
"""What the axis of a norm holds at least: the healthy range is in the middle of it."""
LOSS_SCALE = for_cells(
    below(loss_scale_floor="red", loss_scale_very_low="orange", loss_scale_reduced="blue")
)
LOSS_SCALE_LINES = below(
    loss_scale_floor="red", loss_scale_low="orange", loss_scale_very_low="orange"
)
SKIPPED = above(overflow_warning="orange", overflow_critical="red")

AGREEMENT: Mapping[str, tuple[str, str]] = {"0": ("equal", "green"), "1": ("different", "red")}

_SEVERITIES = ((3, "critical"), (2, "warning"), (1, "info"))


def detected_by_severity(*, keep: tuple[str, ...]) -> str:
    """Return the conditions that node agents find, as numbers: 3 critical, 2 warning, 1 info."""
    return " or ".join(
        f"max by ({', '.join(keep)}) ({_detected(severity)}) * {height}"
        for height, severity in _SEVERITIES
    )


def alerts_by_severity(*, keep: tuple[str, ...]) -> str:
    """Return the firing alerts as numbers: 3 critical, 2 warning, 1 info."""
    return " or ".join(
        f"max by ({', '.join(keep)}) ({_firing(severity)}) * {height}"
        for height, severity in _SEVERITIES
    )


def with_severity(severity: str) -> str:
    """Return the runs that have an alert or a condition of a severity."""
    sources = (_firing(severity), _detected(severity))
    return " or ".join(f"max by ({', '.join(RUN)}) ({source})" for source in sources)


def runs_in_trouble(severity: str) -> str:
    """Return how many runs have an alert or a condition of a severity; 0 where none has."""
    return f"count({with_severity(severity)}) or vector(0)"


def _detected(severity: str) -> str:
    active = series("mp_agent_condition_active", f'severity="{severity}"')
    return f"{active} == 1"


def _firing(severity: str) -> str:
    matchers = f'{SELECTED},alertname=~"MpAgent.+",alertstate="firing",severity="{severity}"'
    return f"ALERTS{{{matchers}}}"
