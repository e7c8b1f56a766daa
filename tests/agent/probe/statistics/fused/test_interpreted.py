"""Runs the kernels in Triton's interpreter: every case of `interpreted_kernels`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

CASES = Path(__file__).with_name("interpreted_kernels.py")
ROOT = CASES.parents[5]


@pytest.mark.slow
def test_the_interpreted_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
