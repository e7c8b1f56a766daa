"""torchrun job → Prometheus → shipped rules → Alertmanager → webhook, with the real servers."""

from concurrent.futures import Future

import pytest

from mp_agent.alerting.conditions import CONDITIONS
from tests.e2e.observatory import Observation, Observatory
from tests.e2e.scenarios import SCENARIOS, Scenario

_FOLLOWS_FROM = {condition.name: condition.follows_from for condition in CONDITIONS}

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.long]


@pytest.fixture(scope="module")
def observations(watching: Observatory) -> dict[str, Future[Observation]]:
    """All scenarios under the same servers, some at a time, as in a real cluster."""
    return {scenario.name: watching.begin(scenario) for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_job_brings_the_alerts_written_down_for_it_and_no_others(
    scenario: Scenario, observations
):
    seen = observations[scenario.name].result()
    assert (seen.exit_code == 0) is scenario.completes, seen.log
    assert seen.fired == scenario.alerts, seen.log
    expected, arrived = set(scenario.alerts), {alert.name for alert in seen.arrived}
    # A warning that begins before its cause is firing arrives, any other is muted.
    assert expected - _effects(scenario) <= arrived <= expected
    for alert in seen.arrived:
        assert alert.annotations["summary"].endswith(".")
        assert alert.annotations["remedy"]
        assert scenario.labels.get(alert.name, {}).items() <= dict(alert.labels).items()


def _effects(scenario: Scenario) -> set[str]:
    """Return the warnings that follow from another alert of the scenario."""
    return {
        name
        for name, severity in scenario.alerts.items()
        if severity != "critical" and not scenario.alerts.keys().isdisjoint(_FOLLOWS_FROM[name])
    }
