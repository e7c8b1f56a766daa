"""Trains with closed standard streams, as a daemon does, into which a C library prints."""

import ctypes
import json
import os
import sys
from pathlib import Path

STEPS = 12
_STREAMS = 3


def run(directory: Path, *streams: int) -> None:
    """Train; note which of the closed streams were in use while the job was watched."""
    import torch

    import mp_agent
    from tests.agent.probe.small_model import make_loss, make_model

    printed = ctypes.CDLL(None).dprintf
    torch.set_num_threads(1)
    for stream in streams:
        os.close(stream)
    used: set[str] = set()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mp_agent.init(model, dir=directory, run="closed", node_agent="none")
    for step in range(STEPS):
        make_loss(model, step).backward()
        optimizer.step()
        for stream in range(_STREAMS):
            if stream in streams:
                printed(stream, b"%s\n", b"a line of a library" * 20)
                used.update(_opened(stream))
    (directory / "used.json").write_text(json.dumps(sorted(used)))
    mp_agent.shutdown()


def _opened(stream: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/self/fd/{stream}")]
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
