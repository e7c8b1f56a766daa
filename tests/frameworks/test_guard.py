"""The guard under trainers that own the loop: NaN of one rank reaches no rank's weights."""

import json
from math import isfinite
from pathlib import Path

import pytest

from mp_agent.ring import locations
from tests.agent.probe.rings import read_ring
from tests.frameworks.guard_job import BAD_BATCH, LATER_BAD_BATCH, SAVED_AT
from tests.frameworks.torchrun import WORLD, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]

BOTH = [BAD_BATCH + 1, LATER_BAD_BATCH + 1]
SKIPPED = {
    "lightning": [BOTH],
    "lightning_manual": [BOTH],
    "accelerate": [BOTH],
    # All that it may, one after the other; then the training stops.
    "transformers": [[BAD_BATCH + 1 + further for further in range(4)]],
    # Before the rank dies, and after the restart, which goes on from a checkpoint.
    "restarted": [[BAD_BATCH + 1], [LATER_BAD_BATCH + 1 - SAVED_AT]],
}
"""Steps of each attempt that both ranks skip."""


@pytest.mark.parametrize("way", SKIPPED)
def test_nan_of_one_rank_reaches_no_weights(way, framework, tmp_path):
    if way != "restarted":
        framework(way.removesuffix("_manual"))
    torchrun(
        "tests.frameworks.guard_job",
        *(way, str(tmp_path)),
        restarts=1 if way == "restarted" else 0,
        MP_AGENT_RUN=way,
        MP_AGENT_DIR=str(tmp_path),
        MP_AGENT_NODE_AGENT="none",
    )
    first, second = (
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(WORLD)
    )
    assert all(map(isfinite, first["weights"]))
    assert first == second
    assert first["stop"] == (way == "transformers")
    assert skipped_steps(tmp_path, way) == sorted(SKIPPED[way] * WORLD)


def skipped_steps(directory: Path, run: str) -> list[list[int]]:
    """Return the steps that the guard skipped, of each ring."""
    rings = locations.find_rings(locations.run_directory(directory, run))
    columns = (read_ring(path, one_schema=False).column("guard_skip_update") for path in rings)
    return sorted([step for step, done in enumerate(own, 1) if done == 1.0] for own in columns)
