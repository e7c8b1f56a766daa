"""A record's two readings agree: what promtool is told to expect, the detectors find as well.

promtool judges the same examples in tests/alerting/test_promtool.py.
"""

import pytest

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.examples import Example
from mp_agent.alerting.promtool_tests import ALL_EXAMPLES
from mp_agent.alerting.values import Values, values_in_force
from tests.alerting.detector.replay import Alert, replay, tracks_of

CASES = [
    pytest.param(condition, example, id=f"{condition.name if condition else 'routine'}-{index}")
    for condition, examples in ALL_EXAMPLES
    for index, example in enumerate(examples)
]


def only_who_scrapes_can_tell(example: Example) -> bool:
    """Return whether it is of targets rather than of a run: no node agent sees those."""
    return example.labels.get("run") == ""


def expected(condition: Condition, example: Example, values: Values) -> set[Alert]:
    if only_who_scrapes_can_tell(example):
        return set()
    labels = {
        name: value
        for name, value in example.labels.items()
        if value and name not in ("namespace", "job", "run")
    }
    return {
        Alert(
            condition.name, severity.value, tuple(sorted(labels.items())), values.fill(description)
        )
        for severity, description in example.fires.items()
    }


@pytest.mark.parametrize("time_scale", [1.0, 0.05])
@pytest.mark.parametrize(("condition", "example"), CASES)
def test_the_detectors_find_what_the_rules_find(
    condition: Condition | None, example: Example, time_scale: float
):
    values = values_in_force(time_scale=time_scale)
    replayed = replay(tracks_of(example, values), example.minutes, values)
    fired = {(name, severity.value) for name, found in example.also.items() for severity in found}
    if condition is not None:
        alerts = expected(condition, example, values)
        fired |= {(alert.name, alert.severity) for alert in alerts}
        for minute in example.not_yet:
            assert replayed.at(minute, condition.name) == set()
        if example.fires:
            assert replayed.at(example.at, condition.name) == alerts
    assert replayed.ever == fired
