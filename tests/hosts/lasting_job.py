"""Trains on several hosts until a file appears, so that a test can let something go wrong.

Every rank prints `rank R step N` at each step and at the end `rank R done N`, rank 0 also
`norm N VALUE` as job.py does. SIGUSR1 lets a rank get stuck in C code, holding the GIL; SIGUSR2
frees it.
"""

import argparse
import ctypes
import math
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mp_agent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gate", type=Path, required=True, help="file that ends the training")
    parser.add_argument("--alone", action="store_true", help="ranks train without each other")
    parser.add_argument("--period", type=float, default=0.1, help="seconds that a step takes")
    options = parser.parse_args()
    signal.signal(signal.SIGUSR1, lambda number, frame: ctypes.PyDLL(None).pause())
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    mp_agent.init()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 5))
    if not options.alone:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    begun, step, last = time.monotonic(), 0, None
    while step != last:
        step += 1
        train(model, optimizer, step)
        # Who is late catches up.
        time.sleep(max(begun + step * options.period - time.monotonic(), 0.0))
        if last is None:
            last = last_step(step, options)
    _print(f"rank {dist.get_rank()} done {step}")
    dist.barrier()
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(torch.randn(8, 16)).pow(2).mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = [gradient.double().square().sum().item() for gradient in gradients]
    optimizer.step()
    optimizer.zero_grad()
    _print(f"rank {dist.get_rank()} step {step}")
    if dist.get_rank() == 0:
        _print(f"norm {step} {math.sqrt(sum(squares))!r}")


def last_step(step: int, options: argparse.Namespace) -> int | None:
    """Return the last step of all ranks, once the gate is there.

    Ranks that train together ask each other at each step, others only then.
    """
    there = options.gate.exists()
    if options.alone and not there:
        return None
    mine = torch.tensor(step if there else 0)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return int(mine) or None


def _print(line: str) -> None:
    """Print a line in one piece: unbuffered, its end would be written apart, after other ranks'."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
