"""A short training job that says what became of its weights: `torchrun counting_job.py`.

Rank 0 prints the digest of all parameters at the end: equal digests mean bit-identical training.
"""

import argparse
import faulthandler
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mp_agent

STEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--gate", type=Path, help="file to wait for in the middle")
    parser.add_argument("--broken-probe", action="store_true", help="make the probe's hooks raise")
    parser.add_argument("--fail-once", action="store_true", help="raise in the first attempt")
    parser.add_argument("--leave-at", type=int, help="step in the middle of which rank 1 exits")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(90)
    mp_agent.init()
    if options.broken_probe:
        break_probe()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=50)
    for step in range(1, options.steps + 1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(8, 16)).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if step == options.leave_at and dist.get_rank() == 1:
            sys.exit(3)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        time.sleep(options.pause)
        if step == options.steps // 2:
            half_way(options)
    if dist.get_rank() == 0:
        print(f"digest {digest(model)}", flush=True)
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


def half_way(options: argparse.Namespace) -> None:
    if options.fail_once and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first attempt fails")
    if options.gate is not None:
        print("half way", flush=True)
        while not options.gate.exists():
            time.sleep(0.02)


def break_probe() -> None:
    from mp_agent.probe.step.measurement import StepMeasurement

    def fill_in(*arguments: object, **options: object) -> None:
        raise RuntimeError("fault injected into the probe")

    StepMeasurement.fill_in = fill_in  # type: ignore[method-assign]


def digest(model: nn.Module) -> str:
    parts = (parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    main()
