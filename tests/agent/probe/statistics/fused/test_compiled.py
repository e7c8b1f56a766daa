"""What the kernels cost in machine code, on GPUs that need not be there: it must not grow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[5]

_LAYERS = dict.fromkeys(("fp32 of layers", "bf16 of layers", "fp16 of layers"), 8.5)
_DISTRIBUTION = {"fp32 distribution": 56.0, "bf16 distribution": 57.0, "fp16 distribution": 57.0}

CEILINGS = {
    "sm_80": {**_LAYERS, "fp16 of layers": 9.5, **_DISTRIBUTION},
    "sm_90": {"fp32": 7.5, "bf16": 7.5, "fp16": 7.5, **_LAYERS, **_DISTRIBUTION},
    "sm_100": {**_LAYERS, **dict.fromkeys(_DISTRIBUTION, 62.0)},
    "gfx942": {},
}
"""Instructions of the loop per element; of the distribution 48 are for 24 boundaries. Of the folds
the loop is short, and counted nowhere."""

REGISTERS_AT_MOST = {"sm_80": 40, "sm_90": 40, "sm_100": 40, "gfx942": 64}
"""With 40 an SM holds 48 warps of 32 threads, each with 32 bytes under way; with 64 a SIMD of
CDNA3 holds its 8 waves."""

REGISTERS_AT_MOST_OF_DISTRIBUTION = {
    **dict.fromkeys(_DISTRIBUTION, 64),
    "edges": 24,
    "distribution fold": 128,
}
"""A thread has a counter and an edge for each boundary; with 64 an SM holds 32 warps of them."""


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
        assert {"fp32 of layers", "bf16 of layers", "fp16 of layers"} <= set(variants)
        assert set(REGISTERS_AT_MOST_OF_DISTRIBUTION) <= set(variants)
        for variant, found in variants.items():
            assert found["spilled_bytes"] == 0, (target, variant)
            at_most = REGISTERS_AT_MOST_OF_DISTRIBUTION.get(variant, REGISTERS_AT_MOST[target])
            assert found["registers"] <= at_most, (target, variant, found)
        measured = {
            variant: found["instructions_per_element"]
            for variant, found in variants.items()
            if "instructions_per_element" in found
        }
        assert set(measured) == set(CEILINGS[target])
        for variant, instructions in measured.items():
            assert instructions <= CEILINGS[target][variant], (target, variant)
