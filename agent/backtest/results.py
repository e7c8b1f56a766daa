"""What a backtest found: the alerts of each run, changes between two, and what was not judged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.values import Severity
from mp_agent.records.conditions import Alert

SEVERITIES = tuple(severity.value for severity in Severity)
"""The worst first."""


@dataclass(frozen=True, slots=True)
class Blind:
    """A condition that could not be judged, and what the log lacks for it."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunCurves:
    """What a page draws of a run, thinned out: one value per place, None where there is none."""

    step: Sequence[int]
    values: Mapping[str, Sequence[float | None]]
    marks: Mapping[str, Sequence[int]]
    """Places at which the loss or the norm was not finite, and steps that were skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What the conditions make of one run."""

    name: str
    source: str
    format: str
    points: int
    first_step: int
    last_step: int
    seconds: float
    """Seconds from the first point to the last."""
    step_seconds: float
    pace_origin: str
    alerts: tuple[Alert, ...]
    highest: Mapping[str, tuple[float, int]]
    """Condition on losses or norms far above the usual one → the highest, and its step."""
    blind: tuple[Blind, ...]
    not_found: tuple[str, ...]
    """Of loss, gradient norm and loss scale those that the log does not hold."""
    notes: tuple[str, ...]
    label: str = ""
    curves: RunCurves | None = None

    @property
    def worst(self) -> str:
        """The worst severity; "" without an alert."""
        return min((alert.severity for alert in self.alerts), key=SEVERITIES.index, default="")

    @property
    def unseen(self) -> tuple[str, ...]:
        """Loss and gradient norm, where the log does not hold them.

        A log without a loss scale is complete where there is no FP16.
        """
        return tuple(name for name in self.not_found if name != Quantity.LOSS_SCALE.value)


@dataclass(frozen=True, slots=True)
class Failure:
    """A log that could not be read, and why."""

    source: str
    problem: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One alert of a run that differs between two settings; None where there is none."""

    run: str
    label: str
    before: Alert | None
    after: Alert | None

    @property
    def name(self) -> str:
        """The condition."""
        alert = self.before or self.after
        return alert.name if alert else ""


def differences(before: Sequence[RunResult], after: Sequence[RunResult]) -> Iterator[Difference]:
    """Yield what differs, run by run: alerts there on one side only, or otherwise severe or early.

    Both hold the same runs in the same order.
    """
    for one, other in zip(before, after, strict=True):
        old = {(alert.name, tuple(alert.labels.items())): alert for alert in one.alerts}
        new = {(alert.name, tuple(alert.labels.items())): alert for alert in other.alerts}
        for key in dict.fromkeys((*old, *new)):
            left, right = old.get(key), new.get(key)
            if left is None or right is None or _differ(left, right):
                yield Difference(one.name, one.label, left, right)


def _differ(left: Alert, right: Alert) -> bool:
    return (left.severity, left.fired_step) != (right.severity, right.fired_step)
