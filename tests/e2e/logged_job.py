"""A training job that logs as trainers do: `torchrun tests/e2e/logged_job.py LOG.csv`.

Linear regression at a learning rate just above the one at which it is stable: the gradients grow
until they explode. Rank 0 writes the loss, averaged over the ranks, and the norm before the step.
"""

import csv
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mp_agent
from tests.e2e.job import FEATURES, wait_until_watched
from tests.gloo import end_process_group

STEPS = 260
PAUSE_SECONDS = 0.03
LEARNING_RATE = 1.04


def main() -> None:
    mp_agent.init()
    wait_until_watched()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    with Path(sys.argv[1]).open("w", newline="") if dist.get_rank() == 0 else _nothing() as file:
        log = csv.writer(file)
        log.writerow(("step", "timestamp", "loss", "grad_norm", "learning_rate"))
        for step in range(1, STEPS + 1):
            loss, norm = make_step(model, optimizer)
            log.writerow((step, time.time(), loss, norm, LEARNING_RATE))
            time.sleep(PAUSE_SECONDS)
    end_process_group()


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Make a step; return the loss averaged over ranks, and the gradients' norm."""
    inputs = torch.randn(4096, FEATURES)
    loss = functional.mse_loss(model(inputs), inputs[:, :1])
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size(), norm.item()


def _nothing():
    return Path("/dev/null").open("w", newline="")


if __name__ == "__main__":
    main()
