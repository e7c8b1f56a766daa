"""Starts a job of several ranks under torch's own launcher."""

import os
import subprocess
import sys
from pathlib import Path

WORLD = 2
ROOT = Path(__file__).parents[2]
# With the store of the launcher, gloo finds the addresses of the first attempt in it.
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(
    module: str, *arguments: str, world: int = WORLD, restarts: int = 0, **environment: str
) -> None:
    """Run a module of the tests on so many ranks; fails, with their output, when they do."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *launcher,
            f"--nproc-per-node={world}",
            f"--max-restarts={restarts}",
            *("-m", module, *arguments),
        ],
        check=False,
        timeout=1800,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / '.editable'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **(_OWN_STORE if restarts else {}),
            **environment,
        },
    )
    assert done.returncode == 0, done.stdout[-20_000:]
