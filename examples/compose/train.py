"""A small classifier in FP16 whose inputs lose their normalisation after a while.

FP16 ends at 65504: the loss scale falls, steps are skipped, and the alerts arrive.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mp_agent

FEATURES, CLASSES, BATCH_SIZE = 16, 4, 64
HEALTHY_STEPS, BROKEN_STEPS = 6000, 6000


def main() -> None:
    """Train; run by torchrun, two ranks on the CPU."""
    mp_agent.init()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, CLASSES))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(HEALTHY_STEPS + BROKEN_STEPS):
        inputs = torch.randn(BATCH_SIZE, FEATURES)
        labels = inputs[:, :CLASSES].argmax(dim=1)
        scale = 1.0 if step < HEALTHY_STEPS else 1e7
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(model(inputs * scale).float(), labels)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
