"""The code in the runbooks does what it says: each sample runs, and asserts its own claim."""

import ast
import faulthandler
import runpy
import signal
from pathlib import Path

import pytest

from mp_agent.alerting.conditions import CONDITIONS

_SAMPLES = sorted((Path(__file__).parents[2] / "alerting" / "samples").glob("*.py"))


@pytest.mark.parametrize("sample", _SAMPLES, ids=lambda path: path.stem)
def test_a_sample_runs_as_it_is_in_the_runbook(sample: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", [str(sample)])
    try:
        runpy.run_path(str(sample), run_name="__main__")
    finally:
        faulthandler.unregister(signal.SIGUSR1)  # one of them registers it


def test_a_sample_is_short_and_says_what_it_is_for() -> None:
    for sample in _SAMPLES:
        text = sample.read_text()
        assert (ast.get_docstring(ast.parse(text)) or "").endswith("."), sample
        assert len(text.splitlines()) <= 55, sample


def test_every_sample_is_in_a_runbook_and_every_runbook_s_samples_exist() -> None:
    used = {name for condition in CONDITIONS for name in condition.guidance.samples}
    assert used == {path.stem for path in _SAMPLES}
