"""Trains while processes come and go next to the ranks: data workers and a child of the user's own.

Every data worker prints at which ports it listens, rank 0 how its child ended.
"""

import argparse
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import mp_agent

STEPS_PER_EPOCH = 8


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4 * STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            # A line in one write: several processes print at once.
            os.write(1, f"worker listens {listening()}\n".encode())
        return torch.randn(16)


def listening() -> str:
    """Return the ports at which this process listens, with commas."""
    ports = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[f"socket:[{fields[9]}]"] = str(int(fields[1].rpartition(":")[2], 16))
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    return ",".join(port for socket, port in ports.items() if socket in own)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gate", type=Path, required=True, help="file to wait for at the end")
    options = parser.parse_args()
    mp_agent.init()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for context in ("fork", "spawn"):
        loader = DataLoader(Samples(), batch_size=4, num_workers=1, multiprocessing_context=context)
        for batch in loader:
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"child {child_end()}", flush=True)
    print("half way", flush=True)
    while not options.gate.exists():
        time.sleep(0.02)
    dist.barrier()
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


def child_end() -> int:
    """Fork a child that trains something of its own, and return its exit code."""
    pid = os.fork()
    if pid == 0:
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
