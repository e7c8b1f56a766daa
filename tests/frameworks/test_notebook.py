"""`%load_ext mp_agent` in IPython: attaches, prints the address, detaches, and again."""

import os
import subprocess
import sys

import pytest

from tests.frameworks.torchrun import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

CELLS = """
import time, urllib.request
import torch
from IPython.testing.globalipapp import start_ipython
from mp_agent.probe import api

shell = start_ipython()
shell.run_cell("%load_ext mp_agent", silent=False)
shell.run_cell('''
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
'''.replace("model =", "import torch; model =", 1))
for turn in range(2):
    shell.run_cell("train()")
    while (address := api.status_url()) is None:
        time.sleep(0.05)
    shell.run_cell("pass")
    shell.run_cell("pass")
    print("answers", urllib.request.urlopen(address, timeout=60).status)
    shell.run_cell("%unload_ext mp_agent")
    assert api.status_url() is None
    shell.run_cell("%load_ext mp_agent")
"""


def test_the_address_is_printed_once_per_attachment_and_answers(framework, tmp_path):
    framework("IPython")
    done = subprocess.run(
        [sys.executable, "-c", CELLS],
        check=False,
        timeout=600,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}",
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "MP_AGENT_DIR": str(tmp_path / "shm"),
            "MP_AGENT_LOG_DIR": str(tmp_path / "log"),
            "MP_AGENT_LINGER_SECONDS": "0",
            "MP_AGENT_PORT": "0",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-5000:]
    lines = done.stdout.splitlines()
    addresses = [line for line in lines if line.startswith("mp_agent: http")]
    assert len(addresses) == 2, done.stdout
    assert [line for line in lines if line.startswith("answers")] == ["answers 200"] * 2
