"""`init()` raises for wrong arguments alone, wherever it is called."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mp_agent
from mp_agent.errors import SettingError

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_init_and_training_go_on_in_odd_places(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.agent.probe.scenarios.odd_places"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path),
            "MP_AGENT_DIR": str(tmp_path / "rings"),
            "MP_AGENT_NODE_AGENT": "none",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [], run.stderr[-10_000:]


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exporters", "[" * 3000),
        ("model", "a name"),
        ("model", Unshowable()),
        ("run", Unshowable()),
        ("thresholds", {"a": [[[[[[1]]]]]]}),
    ],
)
def test_a_wrong_argument_is_refused_by_name_however_odd_it_is(name, value):
    with pytest.raises(SettingError, match=name):
        mp_agent.init(**{name: value})
