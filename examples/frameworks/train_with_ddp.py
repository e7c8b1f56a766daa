"""A loop of one's own, as nanoGPT has it: `torchrun --nproc-per-node=2 train_with_ddp.py`.

Attached by `MP_AGENT_ATTACH=1`, or by `mp_agent.init()` anywhere before the loop. Accumulates over
micro-batches, clips, and prints what it logs.
"""

import json
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, MICRO_BATCHES, TOKENS = 4, 2, 16


def main() -> None:
    """Train a model that predicts the next token from the one before."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    for step in range(1, STEPS + 1):
        total = torch.zeros(())
        for micro in range(MICRO_BATCHES):
            text = torch.randint(0, TOKENS, (4, 9))
            with nullcontext() if micro == MICRO_BATCHES - 1 else model.no_sync():
                logits = model(text[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / MICRO_BATCHES
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        if rank == 0:
            logged = {"step": step, "loss": float(total) / world_size, "grad_norm": float(norm)}
            print(json.dumps(logged), flush=True)
    # Gloo's threads may still hold tensors of the last collective: the end would wait for them, and
    # they for the GIL (torch 2.13).
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
