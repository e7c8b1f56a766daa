"""Simulated runs through the shipped rules: quiet where nothing is wrong, loud where it is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mp_agent.alerting.conditions import CONDITIONS
from tests.alerting.noise.judge import Verdict, judge
from tests.alerting.noise.replay import Recording
from tests.alerting.noise.table import SCENARIOS, record_all, summary, table
from tests.alerting.noise.victoria import judge_by_vmalert

pytestmark = [pytest.mark.slow, pytest.mark.long]


_EVALUATION_SECONDS = 30
"""Prometheus has a minute by default; the committed table is made with half of this."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    return record_all(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def found(
    server: Callable[[str], Path],
    recordings: list[Recording],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Verdict]:
    """What the rules say of each run; the table is printed when a test fails."""
    judged = judge(
        recordings,
        server("promtool"),
        tmp_path_factory.mktemp("promtool"),
        evaluation_seconds=_EVALUATION_SECONDS,
    )
    print(summary(judged), table(judged), sep="\n\n")
    return {verdict.scenario.name: verdict for verdict in judged}


def test_a_healthy_run_brings_no_alert(
    found: dict[str, Verdict], subtests: pytest.Subtests
) -> None:
    for name, verdict in found.items():
        if verdict.scenario.healthy:
            with subtests.test(name):
                assert verdict.surprises == {}
                assert "critical" not in verdict.worst.values()


def test_a_planted_fault_is_found_and_nothing_untrue_is_said(
    found: dict[str, Verdict], subtests: pytest.Subtests
) -> None:
    for name, verdict in found.items():
        if not verdict.scenario.healthy:
            with subtests.test(name):
                assert verdict.missed == {}
                assert verdict.surprises == {}
                for alert in verdict.scenario.expected:
                    assert verdict.seconds_to(alert) >= 0, f"{alert} fired before the fault"


def test_victoria_metrics_comes_to_the_same(
    server: Callable[[str], Path], recordings: list[Recording], tmp_path: Path
) -> None:
    """vmalert reads the same rules in its own language, close to PromQL."""
    for verdict in judge_by_vmalert(recordings, server, tmp_path):
        assert verdict.missed == {}, verdict.scenario.name
        assert verdict.surprises == {}, verdict.scenario.name


def test_every_scenario_is_judged(found: dict[str, Verdict]) -> None:
    assert found.keys() == {scenario.name for scenario in SCENARIOS}


def test_there_are_twenty_healthy_runs_and_a_fault_for_every_condition() -> None:
    assert sum(scenario.healthy for scenario in SCENARIOS) >= 20
    planted = {name for scenario in SCENARIOS for name in scenario.expected}
    assert {condition.name for condition in CONDITIONS} <= planted
