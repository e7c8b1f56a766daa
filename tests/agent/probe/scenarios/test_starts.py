"""Programs that are started again by the same launcher, which does not say so to anybody."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mp_agent.ring import locations
from tests.agent.probe.rings import read_ring

pytestmark = pytest.mark.long

_STEPS = 3
_TRAINING = f"""
import os, sys, torch, mp_agent

mp_agent.init(run="again", node_agent="none")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({_STEPS}):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if len(sys.argv) > 1:
    os.execv(sys.executable, [sys.executable, sys.argv[0]])
"""


def _train(directory: Path, *arguments: str, training: str = _TRAINING, **variables: str) -> None:
    script = directory / "train.py"
    script.write_text(training)
    environment = {**os.environ, "MP_AGENT_DIR": str(directory), **variables}
    command = [sys.executable, str(script), *arguments]
    subprocess.run(command, env=environment, check=True, timeout=120)


def _steps_recorded(directory: Path) -> list[int]:
    rings = [ring for run in locations.find_runs(directory) for ring in locations.find_rings(run)]
    return [len(read_ring(ring).records) for ring in rings]


@pytest.mark.slow
def test_ranks_that_one_launcher_starts_twice_are_recorded_twice(tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for _ in range(2):
        _train(tmp_path, **place)
    assert _steps_recorded(tmp_path) == [_STEPS, _STEPS]


@pytest.mark.slow
def test_a_program_that_executes_itself_again_is_recorded_again(tmp_path: Path) -> None:
    _train(tmp_path, "again")
    assert _steps_recorded(tmp_path) == [_STEPS, _STEPS]


@pytest.mark.slow
def test_a_program_that_is_interrupted_as_its_ring_is_made_has_one_ring(tmp_path: Path) -> None:
    interrupted = """
from mp_agent.probe import attachment
made = attachment.ConditionCallbacks
def interrupt(*_, **__):
    attachment.ConditionCallbacks = made
    raise KeyboardInterrupt
attachment.ConditionCallbacks = interrupt
try:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
except KeyboardInterrupt:
    optimizer.zero_grad()
else:
    raise AssertionError
for"""
    _train(tmp_path, training=_TRAINING.replace("for", interrupted, 1))
    assert _steps_recorded(tmp_path) == [_STEPS]
