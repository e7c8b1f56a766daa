"""A job whose gradients explode until every rank has heard of it: torchrun conditions_job.py DIR.

Each rank writes what its callback was given, one line per call, into its own file.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mp_agent

HEARD_WITHIN_SECONDS = 60.0
STEP_PAUSE_SECONDS = 0.02
USUAL_SECONDS = 1.0
"""In which the norm is what the run is used to."""

heard: list[mp_agent.ConditionEvent] = []


@mp_agent.on_condition
def fail(condition: mp_agent.ConditionEvent) -> None:
    raise RuntimeError("this callback is broken")


@mp_agent.on_condition
def note(condition: mp_agent.ConditionEvent) -> None:
    heard.append(condition)
    file = Path(sys.argv[1]) / f"rank{dist.get_rank()}.jsonl"
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(condition)) + "\n")


def all_have_heard() -> bool:
    count = torch.tensor(float(any(c.severity == "critical" for c in heard)))
    dist.all_reduce(count)
    return count.item() == dist.get_world_size()


def main() -> None:
    mp_agent.init()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    torch.manual_seed(dist.get_rank())  # ranks that share their batches are warned of
    begun, scale = time.monotonic(), 1.0
    while not all_have_heard() and time.monotonic() - begun < HEARD_WITHIN_SECONDS:
        (model(1.0 + 0.1 * torch.randn(4, 8)).mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_PAUSE_SECONDS)
        if time.monotonic() - begun > USUAL_SECONDS:
            scale = 1e6
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
