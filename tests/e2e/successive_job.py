"""Trains folds one after another from scratch, and all of it again after `shutdown()` and `init()`.

Two optimizers train each fold's model, and all of them stay alive. Rank 0 prints the norms of the
last step's gradients, of the model and of each optimizer's part, by a float64 reference.
"""

import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import mp_agent

ROUNDS, FOLDS, STEPS = 3, 2, 10


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    kept = []
    for _ in range(ROUNDS):
        mp_agent.init()
        for _ in range(FOLDS):
            kept.append(train())
        mp_agent.shutdown()
    if dist.get_rank() == 0:
        print("norms", *kept[-1][1:], flush=True)
    dist.barrier()
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


def train() -> tuple[list[torch.optim.Optimizer], float, float, float]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizers = [torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(rest, lr=1e-3)]
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 16)).pow(2).mean().backward()
        norms = norm_of([*matrices, *rest]), norm_of(matrices), norm_of(rest)
        clip_grad_norm_(model.parameters(), 1e-3)
        for optimizer in optimizers:
            optimizer.step()
    return optimizers, *norms


def norm_of(parameters: list[nn.Parameter]) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))


if __name__ == "__main__":
    main()
