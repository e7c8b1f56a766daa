"""Simulated runs, through scrapes that fail, targets that move and stores that start empty."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.alerting.noise.judge import Verdict, judge
from tests.alerting.noise.replay import Recording, record
from tests.alerting.noise.rough import ROUGH, Rough

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def found(
    server: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Verdict]:
    directory = tmp_path_factory.mktemp("skies")
    recordings = [_recorded(rough, directory) for rough in ROUGH]
    judged = judge(recordings, server("promtool"), directory)
    return {verdict.scenario.name: verdict for verdict in judged}


def _recorded(rough: Rough, directory: Path) -> Recording:
    recording = record(rough.scenario, directory)
    for sky in rough.skies:
        recording = sky(recording)
    return recording


@pytest.mark.parametrize("name", [rough.scenario.name for rough in ROUGH])
def test_what_is_wrong_is_found_and_nothing_else_is_told(
    found: dict[str, Verdict], name: str
) -> None:
    assert found[name].missed == {}
    assert found[name].surprises == {}
    for alert in found[name].scenario.expected:
        assert found[name].seconds_to(alert) >= 0, f"{alert} fired before the fault"
