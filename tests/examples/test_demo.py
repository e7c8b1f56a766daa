"""The demo itself: the alerts arrive, it ends by itself, and nothing is left running."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo import alerts
from examples.demo.outcome import Outcome
from examples.demo.run import run_demo
from examples.demo.scenarios import BY_NAME, HEALTHY, Scenario

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.long]

EXPLODING = {"MpAgentGradientExplosion", "MpAgentLossNonFinite", "MpAgentLossScaleAtFloor"}
ALSO_TRUE = {
    "MpAgentGradientNonFinite",
    "MpAgentLossSpike",
    "MpAgentLossDiverging",
    "MpAgentRankNonFinite",
    "MpAgentLayerGradientExplosion",
}
"""Which of them come as well depends on where the numbers break first."""


def watched(scenario: Scenario) -> tuple[Outcome, str]:
    """Run the demo with one scenario; return what was found and what was shown."""
    shown = io.StringIO()
    (outcome,) = run_demo((scenario,), Console(file=shown, width=100))
    assert not outcome.problem
    return outcome, shown.getvalue()


def processes_with(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line:
            found.append(line)
    return found


def test_a_job_goes_wrong_and_the_alerts_arrive_from_the_real_servers(server):
    server("prometheus"), server("alertmanager")
    outcome, shown = watched(BY_NAME["residual"])
    assert EXPLODING <= {alert.name for alert in outcome.alerts} <= EXPLODING | ALSO_TRUE
    assert outcome.first is not None
    assert outcome.first.what == "gradient norm above 100"
    assert 0 < outcome.first.step < BY_NAME["residual"].steps
    assert outcome.first.layer
    unwrapped = " ".join(shown.replace("│", " ").split())
    for alert in outcome.alerts:
        assert alert.name in shown
        assert alert.annotations["summary"] in unwrapped
    assert "What to do: " in shown
    assert not processes_with("demo-residual")
    assert not processes_with("mp_agent-demo-")


def test_without_servers_the_metrics_show_the_same_and_the_demo_says_so(monkeypatch):
    monkeypatch.setattr(alerts, "find", lambda name: None)
    outcome, shown = watched(BY_NAME["learning-rate"])
    assert {alert.name for alert in outcome.alerts} >= {
        "MpAgentLossNonFinite",
        "MpAgentLossScaleAtFloor",
    }
    assert outcome.first is not None and outcome.first.what == "loss NaN or Inf"
    assert "not on PATH, and apt cannot install them" in shown
    assert not processes_with("demo-learning-rate")


def test_the_same_model_without_a_mistake_brings_no_alert(server):
    server("prometheus"), server("alertmanager")
    outcome, _ = watched(HEALTHY)
    assert outcome.first is None
    assert not outcome.alerts
