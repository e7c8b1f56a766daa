"""Where standard streams are closed, nothing of ours takes their place."""

import json
import subprocess
import sys

import pytest

from mp_agent.ring import locations
from tests.agent.probe.processes import closed_streams
from tests.agent.probe.rings import read_ring


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("streams", [(0, 1, 2), (2,), (0,)], ids=["all", "errors", "input"])
def test_what_a_library_prints_is_not_written_to_the_ring(tmp_path, streams):
    command = [sys.executable, "-m", closed_streams.__name__, str(tmp_path), *map(str, streams)]
    subprocess.run(command, check=True)
    (run_dir,) = locations.find_runs(tmp_path)
    (ring,) = locations.find_rings(run_dir)
    contents = read_ring(ring)
    assert [record.sequence for record in contents.records] == [*range(1, closed_streams.STEPS + 1)]
    assert json.loads((tmp_path / "used.json").read_text()) == []
    assert b"a line of a library" not in ring.read_bytes()
