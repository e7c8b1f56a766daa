"""Simulated runs, through scrapes that fail, targets that move and stores that start empty."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.alerting.noise.adverse_runs import ADVERSE_RUNS, AdverseRun
from tests.alerting.noise.judge import Verdict, judge
from tests.alerting.noise.replay import Recording, record

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def found(
    server: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Verdict]:
    directory = tmp_path_factory.mktemp("effects")
    recordings = [_recorded(adverse, directory) for adverse in ADVERSE_RUNS]
    judged = judge(recordings, server("promtool"), directory)
    return {verdict.scenario.name: verdict for verdict in judged}


def _recorded(adverse: AdverseRun, directory: Path) -> Recording:
    recording = record(adverse.scenario, directory)
    for effect in adverse.effects:
        recording = effect(recording)
    return recording


@pytest.mark.parametrize("name", [adverse.scenario.name for adverse in ADVERSE_RUNS])
def test_what_is_wrong_is_found_and_nothing_else_is_reported(
    found: dict[str, Verdict], name: str
) -> None:
    assert found[name].missed == {}
    assert found[name].surprises == {}
    for alert in found[name].scenario.expected:
        assert found[name].seconds_to(alert) >= 0, f"{alert} fired before the fault"
