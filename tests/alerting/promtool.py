"""promtool's unit tests, for a quarter less processor time than it takes by default."""

import os
import subprocess
from pathlib import Path

_ENVIRONMENT = {"GOGC": "400"}
"""Each test has a small database of its own, so that collecting garbage is much of the work."""


def unit_test(promtool: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """Run the unit tests in a file; what fails is told on both outputs."""
    return subprocess.run(
        [promtool, "test", "rules", file],
        capture_output=True,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    )


def assert_passes(promtool: Path, file: Path) -> None:
    """Run the unit tests in a file; every one must pass."""
    done = unit_test(promtool, file)
    assert done.returncode == 0, (done.stdout + done.stderr)[:5_000]
