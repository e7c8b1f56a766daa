"""The kernels are compiled once, ahead, whatever is measured later."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]
VARIANTS = 2 * (3 + 1) + 1 + 3 + 1
"""With and without the sum of magnitudes, three kinds of elements and the fold; of the
distribution edges, three kinds and the fold."""


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_compiled_by_the_first_launch_nor_by_any_later_one(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / ".editable"), str(ROOT)))
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.probe.statistics.fused.launched_variants"],
        env=environment,
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ahead"], found["first"], found["later"]) == (VARIANTS, 0, 0)
    rounds = 6 * 3 * 2
    # Two measurements of a launch that measures and one that folds, one with edges before.
    assert len(found["grids"]) == rounds * (2 * 2 + 3)
