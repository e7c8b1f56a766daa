"""Published series of real runs: healthy ones page no one, broken ones are found."""

import pytest

from tests.alerting.real_runs.replay import RealRun, load, play, table

RUNS = load()
WARNED_AT_MOST = 3

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def found() -> list[tuple[RealRun, dict[str, str]]]:
    """What each run brought; the table is printed when a test fails."""
    judged = [(run, play(run)) for run in RUNS]
    print(table(judged))
    return judged


def _brought(
    found: list[tuple[RealRun, dict[str, str]]], label: str, *severities: str
) -> dict[str, dict[str, str]]:
    return {
        run.name: worst
        for run, worst in found
        if run.label == label and (not severities or set(severities) & set(worst.values()))
    }


def test_no_healthy_run_brings_a_critical_alert(found) -> None:
    assert len(_brought(found, "healthy")) >= 40
    assert _brought(found, "healthy", "critical") == {}


def test_few_healthy_runs_bring_a_warning(found) -> None:
    assert len(_brought(found, "healthy", "warning")) <= WARNED_AT_MOST


def test_every_broken_run_brings_a_critical_alert(found) -> None:
    wrong = _brought(found, "wrong")
    assert wrong.keys() == _brought(found, "wrong", "critical").keys()
    assert len(wrong) >= 6


def test_non_finite_norms_are_reported_long_before_the_loss_is_gone(found) -> None:
    """The norm went first, and the loss became 0 more than a thousand points later."""
    worst = next(worst for run, worst in found if run.name == "077")
    assert worst["MpAgentGradientNonFinite"] == "critical"
    assert worst["MpAgentNothingTrained"] == "critical"
