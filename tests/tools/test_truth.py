"""The table of real runs: what it claims is checked, and it is what the series give."""

import json
import os
import sys
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from mp_agent.records.conditions import Alert
from tools import truth

VARIABLE = "MP_AGENT_RUNS_DIR"


def write(directory: Path, name: str, label: str, loss: list[float], norm: list[float]) -> None:
    content: dict[str, Any] = {
        "kind": "a run",
        "label": label,
        "why": "made up",
        "steps": list(range(1, len(loss) + 1)),
        "loss": loss,
        "grad_norm": norm,
    }
    (directory / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def runs(tmp_path: Path) -> list[truth.Judged]:
    calm = [2.0 + 0.01 * (n % 5) for n in range(120)]
    write(tmp_path, "calm", "healthy", calm, [1.0] * 120)
    # The norm is lost at point 80, the loss at point 110.
    norms = [1.0] * 80 + [nan] * 40
    write(tmp_path, "lost", "wrong", [*calm[:110], *[0.0] * 10], norms)
    return truth.judge(tmp_path)


def test_the_lead_is_from_the_alert_to_the_loss(runs: list[truth.Judged]) -> None:
    calm, lost = runs
    assert calm.first_critical is None and calm.lead == "-"
    assert lost.shown_point == 110
    assert lost.first_critical is not None and lost.first_critical.fired_point == 82
    assert lost.lead == "28 points"
    text = truth.page(runs)
    assert "1 healthy runs with 120 points: 0 bring a critical alert, 0 a warning" in text
    assert "| lost | a run | 120 | MpAgentGradientNonFinite | 83 | 28 points | made up |" in text


@pytest.mark.parametrize(
    ("severity", "problem"),
    [("critical", "is healthy and brings MpAgentMadeUp"), ("warning", "is not explained")],
)
def test_a_false_alarm_without_an_explanation_fails(runs, severity: str, problem: str) -> None:
    calm, lost = runs
    (alert, *_) = lost.result.alerts
    made_up: Alert = replace(alert, name="MpAgentMadeUp", severity=severity)
    with_alarm = replace(calm, result=replace(calm.result, alerts=(made_up,)))
    with pytest.raises(SystemExit, match=problem):
        truth.page([with_alarm, lost])


@pytest.mark.slow
def test_the_committed_table_is_what_the_series_give(monkeypatch) -> None:
    directory = os.environ.get(VARIABLE)
    if not directory:
        pytest.skip(f"{VARIABLE} names no directory of published series")
    monkeypatch.setattr(sys, "argv", ["truth", directory, "--check"])
    assert truth.main() == 0
