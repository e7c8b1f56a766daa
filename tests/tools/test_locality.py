"""How far apart the code lies, held where it is: raise a limit only for what is worth it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tools.locality import file_counts

_ONE_STEP = "import json; from tools.locality import step_calls; print(json.dumps(step_calls()))"


def test_the_probe_and_what_is_shipped_have_few_modules() -> None:
    counts = file_counts()
    assert 50 < counts["modules under probe"] <= 110
    assert 300 < counts["shipped modules"] <= 500


def test_a_step_without_layers_takes_few_calls_in_few_modules(tmp_path: Path) -> None:
    settings = {"MP_AGENT_DIR": str(tmp_path), "MP_AGENT_NODE_AGENT": "external"}
    job = subprocess.run(
        [sys.executable, "-c", _ONE_STEP],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    counts = json.loads(job.stdout)
    assert 100 < counts["calls of one step"] <= 187
    assert 20 < counts["modules of one step"] <= 28
    assert 5 < counts["own frames from the hook to the ring"] <= 8
