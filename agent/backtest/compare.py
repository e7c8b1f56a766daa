"""What another setting changes: alerts that come, go, or change their severity."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mp_agent.backtest.results import Alert, RunResult


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
