"""What the kernels cost in machine code, on GPUs that need not be there: it must not grow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[5]

CEILINGS = {
    "sm_80": {"fp32 smallest": 7.5, "bf16 smallest": 7.5, "fp16 smallest": 8.5},
    "sm_90": {
        "fp32": 6.9,
        "bf16": 6.9,
        "fp16": 6.9,
        "fp32 smallest": 7.5,
        "bf16 smallest": 7.5,
        "fp16 smallest": 7.5,
    },
    "sm_100": {"fp32 smallest": 7.5, "bf16 smallest": 7.5, "fp16 smallest": 7.5},
    "gfx942": {},
}
"""Instructions of the loop per element. Of the fold the loop is short, and counted nowhere."""

REGISTERS_AT_MOST = {"sm_80": 40, "sm_90": 40, "sm_100": 40, "gfx942": 64}
"""With 40 an SM holds 48 warps of 32 threads, each with 32 bytes under way; with 64 a SIMD of
CDNA3 holds its 8 waves."""


@pytest.mark.slow
def test_registers_spills_and_instructions_stay_below_their_ceilings(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.probe.statistics.fused.compiled_figures"],
        env={
            **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            "PYTHONPATH": os.pathsep.join((str(ROOT / ".editable"), str(ROOT))),
            "TRITON_CACHE_DIR": str(tmp_path),
        },
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) == set(CEILINGS)
    for target, variants in figures.items():
        assert {"fp32 smallest", "bf16 smallest", "fp16 smallest"} <= set(variants)
        for variant, found in variants.items():
            assert found["spilled_bytes"] == 0, (target, variant)
            assert found["registers"] <= REGISTERS_AT_MOST[target], (target, variant, found)
        measured = {
            variant: found["instructions_per_element"]
            for variant, found in variants.items()
            if "instructions_per_element" in found
        }
        assert set(measured) == set(CEILINGS[target])
        for variant, instructions in measured.items():
            assert instructions <= CEILINGS[target][variant], (target, variant)
