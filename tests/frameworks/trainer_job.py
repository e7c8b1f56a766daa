"""`torchrun -m tests.frameworks.trainer_job DIRECTORY`: transformers' Trainer, and accelerate."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.agent.probe.watching import watched
from tests.frameworks.phases_seen import PhasesSeen
from tests.gloo import end_process_group

STEPS, SAVED_STEP, ACCUMULATED = 6, 3, 4


class Text(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Norms(TrainerCallback):
    """The gradients' norm before clipping, as the trainer's own parameters show it."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        squares = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters())
        self.norms.append(squares**0.5)


def make_trainer(directory: Path, **options) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    settings = {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATED,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": SAVED_STEP,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**settings),
        train_dataset=Text(),
        eval_dataset=[Text()[index] for index in range(4)],
    )


def train(directory: Path, rank: int) -> None:
    variants: dict[str, dict[str, Any]] = {
        "adam": {"eval_strategy": "steps", "eval_steps": 2},
        "sgd": {"optim": "sgd"},
    }
    for name, options in variants.items():
        trainer, norms = make_trainer(directory / name, **options), Norms()
        trainer.add_callback(norms)
        with (
            watched(directory / name / "ring", rank, dist.get_world_size()),
            PhasesSeen() as phases,
        ):
            trainer.train()
        if rank == 0:
            found = {"norms": norms.norms, "phases": phases.seen}
            (directory / name / "seen.json").write_text(json.dumps(found))
            trainer.save_state()
        dist.barrier()
        resumed = make_trainer(directory / name, **options)
        with watched(directory / name / "resumed", rank, dist.get_world_size()):
            resumed.train(resume_from_checkpoint=str(directory / name / f"checkpoint-{SAVED_STEP}"))


def train_one_after_the_other(directory: Path, rank: int) -> None:
    """A second trainer goes on from the first one's checkpoint while the first one lives."""
    first = make_trainer(directory, gradient_accumulation_steps=1)
    second = make_trainer(directory, gradient_accumulation_steps=1)
    with watched(directory / "ring", rank, dist.get_world_size()):
        first.train()
        second.train(resume_from_checkpoint=str(directory / f"checkpoint-{SAVED_STEP}"))


def train_with_accelerate(directory: Path, rank: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(rank)
    rows: Any = torch.randn(8 * ACCUMULATED * 2, 4)
    data: DataLoader[torch.Tensor] = DataLoader(rows, batch_size=2)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses: list[list[float]] = [[]]
    with watched(directory / "accelerate", rank, dist.get_world_size()):
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(batch).pow(2).mean()
                losses[-1].append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    losses.append([])
                optimizer.step()
                optimizer.zero_grad()
    means = [sum(step) / len(step) for step in losses if len(step) == ACCUMULATED]
    (directory / "accelerate" / f"losses{rank}.json").write_text(json.dumps(means))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    place, own = Path(sys.argv[1]), dist.get_rank()
    train(place, own)
    train_one_after_the_other(place / "successive", own)
    train_with_accelerate(place, own)
    end_process_group()
