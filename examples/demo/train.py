"""The demo's training job, an ordinary script: `torchrun -m examples.demo.train --scenario NAME`.

Two lines of it are mp_agent's: the import and `init()`.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mp_agent
from examples.demo.corpus import VOCABULARY_SIZE, batches, load_corpus
from examples.demo.model import CONTEXT, CharTransformer, next_character_loss
from examples.demo.scenarios import BY_NAME

BATCH_SIZE = 8
WARMUP_STEPS = 100


def main() -> None:
    """Train on the CPU with FP16 autocast and a GradScaler, data-parallel over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=BY_NAME, default="healthy")
    scenario = BY_NAME[parser.parse_args().scenario]

    mp_agent.init()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = load_corpus()
    data = batches(corpus, BATCH_SIZE, CONTEXT, dist.get_rank(), dist.get_world_size())
    model = DistributedDataParallel(
        CharTransformer(
            VOCABULARY_SIZE,
            len(corpus),
            normalised_inputs=scenario.normalised_inputs,
            normalised_branches=scenario.normalised_branches,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=scenario.learning_rate)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, 1.0, WARMUP_STEPS)
    scaler = torch.amp.GradScaler("cpu")

    for _ in range(scenario.steps):
        tokens, following, offsets = next(data)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = next_character_loss(model(tokens, offsets), following)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        warmup.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
