import os
import subprocess
import sys
from pathlib import Path

from mp_agent.records.steps import EndReason
from mp_agent.ring import locations
from mp_agent.ring.reader import RingReader

_UNMODIFIED = """
import sys
import helper_beside_the_script
import torch

assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "0.5"]
weight = torch.nn.Parameter(torch.ones(3))
(weight * 2).sum().backward()
torch.optim.SGD([weight], lr=float(sys.argv[2])).step()
"""


def _run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "MP_AGENT_DIR": str(directory / "shm"),
        "MP_AGENT_NODE_AGENT": "none",
        "MP_AGENT_RUN": "run-test",
    }
    command = [sys.executable, "-m", "mp_agent", "run", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_an_unmodified_script_is_watched_with_its_own_arguments_and_imports(tmp_path):
    (tmp_path / "helper_beside_the_script.py").touch()
    (tmp_path / "train.py").write_text(_UNMODIFIED)
    result = _run(tmp_path, str(tmp_path / "train.py"), "--lr", "0.5")
    assert result.returncode == 0, result.stderr
    (path,) = locations.find_rings(locations.run_directory(tmp_path / "shm", "run-test"))
    reader = RingReader.open(path)
    assert reader.state.committed_sequence == 1
    assert reader.state.end_reason is EndReason.COMPLETED
    reader.close()


def test_a_script_that_does_not_exist_is_named(tmp_path):
    result = _run(tmp_path, "no_such_script.py")
    assert result.returncode == 2
    assert "no_such_script.py" in result.stderr
