"""Runs the kernels in Triton's interpreter: every case of `interpreted_*`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ROOT = HERE.parents[4]


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["interpreted_kernels.py", "interpreted_distribution.py"])
def test_the_interpreted_kernels_agree_with_the_reference(cases: str) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
