"""`torchrun -m tests.frameworks.lightning_job DIRECTORY`: Lightning and Fabric."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from tests.agent.probe.watching import watched
from tests.frameworks.phases_seen import PhasesSeen
from tests.gloo import end_process_group

STEPS, ACCUMULATED = 4, 3
RANK = int(os.environ["RANK"])


class Messages(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


class Automatic(LightningModule):
    """Lightning's own loop; notes its losses, and the gradients before they are clipped."""

    def __init__(self, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen: dict[str, list[float]] = {"losses": [], "norms": [], "steps": []}
        self._optimizer = optimizer

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch).pow(2).mean()
        self.seen["losses"].append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.model(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        squares = sum(float(p.grad.double().pow(2).sum()) for p in self.parameters())
        self.seen["norms"].append(squares**0.5)

    def on_train_batch_end(self, *_: object) -> None:
        if self.trainer.global_step not in self.seen["steps"]:
            self.seen["steps"].append(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self._optimizer)(
            self.parameters(), lr=0.05
        )
        return optimizer


class Adversarial(LightningModule):
    """Two models and two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
        self.seen: dict[str, list[float]] = {"losses": [], "norms": [], "steps": []}

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        ahead, behind = self.optimizers()
        ahead.zero_grad()
        fake = self.generator(batch)
        for_real = (self.discriminator(batch) - 1).pow(2).mean()
        for_fake = self.discriminator(fake.detach()).pow(2).mean()
        self.manual_backward(for_real + for_fake)
        gradients = [p.grad for p in self.discriminator.parameters() if p.grad is not None]
        self.seen["losses"].append((for_real + for_fake).item())
        self.seen["norms"].append(
            sum(float(gradient.pow(2).sum()) for gradient in gradients) ** 0.5
        )
        self.clip_gradients(ahead, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
        ahead.step()
        behind.zero_grad()
        self.manual_backward((self.discriminator(fake) - 1).pow(2).mean())
        behind.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3),
            torch.optim.Adam(self.generator.parameters(), lr=1e-3),
        ]


def batches() -> DataLoader[torch.Tensor]:
    torch.manual_seed(1 + RANK)
    rows: Any = torch.randn(64, 4)
    return DataLoader(rows, batch_size=2)


def fit(directory: Path, name: str, model: LightningModule, resume: str | None = None, **options):
    messages = Messages()
    logging.getLogger("mp_agent").addHandler(messages)
    settings = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(directory),
        **options,
    }
    trainer = Trainer(**settings)
    with watched(directory / name, RANK, trainer.world_size) as probe, PhasesSeen() as phases:
        trainer.fit(model, batches(), batches(), ckpt_path=resume)
        probe.flush()
    found = {**model.seen, "phases": phases.seen, "messages": messages.seen}
    (directory / name / f"seen{RANK}.json").write_text(json.dumps(found))
    logging.getLogger("mp_agent").removeHandler(messages)
    return trainer


def train_with_fabric(directory: Path) -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses, norms = [], []
    with watched(directory / "fabric", RANK, 2):
        for step in range(STEPS):
            total = 0.0
            for micro in range(ACCUMULATED):
                last = micro == ACCUMULATED - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    torch.manual_seed(100 * RANK + 10 * step + micro)
                    loss = model(torch.randn(2, 4)).pow(2).mean() / ACCUMULATED
                    fabric.backward(loss)
                    total += loss.item()
            losses.append(total)
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=1e-2)))
            optimizer.step()
            optimizer.zero_grad()
    found = {"losses": losses, "norms": norms}
    (directory / "fabric" / f"seen{RANK}.json").write_text(json.dumps(found))


def main(directory: Path) -> None:
    ddp: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    fit(directory, "default", Automatic(), val_check_interval=2, limit_val_batches=2, **ddp)
    fit(
        directory,
        "accumulated",
        Automatic("Adam"),
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1e-2,
        limit_val_batches=0,
        **ddp,
    )
    unused: dict[str, Any] = {"strategy": "ddp_find_unused_parameters_true", "devices": 2}
    both = 2 * STEPS  # Lightning counts the steps of both optimizers
    fit(directory, "by_hand", Adversarial(), limit_val_batches=0, **{**unused, "max_steps": both})
    first = fit(directory, "begun", Automatic(), limit_val_batches=0, **ddp)
    saved = directory / "saved.ckpt"
    first.save_checkpoint(saved)
    fit(
        directory,
        "resumed",
        Automatic(),
        resume=str(saved),
        limit_val_batches=0,
        **{**ddp, "max_steps": 2 * STEPS},
    )
    train_with_fabric(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if dist.is_initialized():
        end_process_group()
