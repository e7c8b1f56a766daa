"""A record's two readings agree: what promtool is given to expect, the detectors find as well.

promtool judges the same examples in tests/alerting/rules/test_promtool_tests.py.
"""

import pytest

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import Values, values_in_force
from tests.alerting.detector.replay import expected, replay, tracks_of
from tests.alerting.examples.catalog import examples_of
from tests.alerting.examples.example import Example
from tests.alerting.promtool import ALL_EXAMPLES
from tests.every import for_every

pytestmark = pytest.mark.long

CASES = {
    f"{condition.name if condition else 'routine'}-{index}": (condition, example)
    for condition, examples in ALL_EXAMPLES
    for index, example in enumerate(examples)
}


@pytest.mark.slow
@for_every(CASES)
def test_the_detectors_find_what_the_rules_find(case: tuple[Condition | None, Example]):
    judge(*case, values_in_force())


@pytest.mark.slow
@for_every(CONDITIONS, lambda condition: condition.name)
def test_so_they_do_with_minutes_turned_to_seconds(condition: Condition):
    for example in (examples_of(condition).firing[0], examples_of(condition).quiet[0]):
        judge(condition, example, values_in_force(time_scale=1 / 60))


def judge(condition: Condition | None, example: Example, values: Values) -> None:
    """Replay an example; the detectors must find what it says, and nothing else."""
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
