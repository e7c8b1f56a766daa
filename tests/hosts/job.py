"""Trains a small model on several hosts, and prints the gradient norms that it computes itself.

Rank 0 prints `norm STEP VALUE` at each step: the norm over all parameters, in float64.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mp_agent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--gate", type=Path, help="file to wait for after the last step")
    options = parser.parse_args()
    mp_agent.init()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 5))
    if options.wrapper == "fsdp2":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(1, options.steps + 1):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        norm = global_norm(model, sharded=options.wrapper == "fsdp2")
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            _print(f"norm {step} {norm!r}")
        time.sleep(options.pause)
    _print("done")
    while options.gate is not None and not options.gate.exists():
        time.sleep(0.05)
    dist.barrier()
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


def global_norm(model: nn.Module, *, sharded: bool) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares += local.double().square().sum()
    if sharded:
        dist.all_reduce(squares)
    return math.sqrt(squares.item())


def _print(line: str) -> None:
    """Print a line in one piece: unbuffered, its end would be written apart, after other ranks'."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
