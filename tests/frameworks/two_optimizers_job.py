"""`torchrun -m tests.frameworks.two_optimizers_job DIRECTORY`: Muon and AdamW train one model."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.agent.probe.watching import watched
from tests.gloo import end_process_group

STEPS, POISONED_STEP, LIMIT = 6, 5, 0.05
RANK = int(os.environ["RANK"])


class Model(nn.Module):
    """Matrices for Muon, biases and a norm for AdamW; one backward of it may be poisoned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
        self.backwards = 0
        last = self.layers[3]
        assert isinstance(last, nn.Linear)
        last.bias.register_hook(self._poison)

    def _poison(self, gradient: torch.Tensor) -> torch.Tensor:
        self.backwards += 1
        spoilt = RANK == 1 and self.backwards == POISONED_STEP
        return torch.full_like(gradient, torch.nan) if spoilt else gradient

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).pow(2).mean()}


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the optimizer of the matrices and that of everything else."""
    parameters = list(model.parameters())
    return [
        Muon([each for each in parameters if each.ndim == 2], lr=1e-3),
        AdamW([each for each in parameters if each.ndim != 2], lr=1e-3),
    ]


class Both(Optimizer):
    """One optimizer for a trainer that takes one; steps two."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = optimizers_of(model)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class BothWithoutHooks(Optimizer):
    """The same, by a class that is an optimizer in name alone: torch's hooks see the two."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = optimizers_of(model)
        self.defaults: dict[str, Any] = {}
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"state": [part.state_dict() for part in self.parts], "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["state"], strict=True):
            part.load_state_dict(state)


class Reference:
    """What the gradients of the whole model and of each part were before they were clipped."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.parts: list[list[float]] = []

    def note(self, model: nn.Module) -> None:
        """Compute norms in float64."""
        parameters = list(model.parameters())
        self.norms.append(_norm(parameters))
        self.parts.append(
            [_norm(p for p in parameters if (p.ndim == 2) is m) for m in (True, False)]
        )

    def write(self, directory: Path) -> None:
        """Leave it for the test."""
        found = {"norms": self.norms, "parts": self.parts}
        (directory / f"reference{RANK}.json").write_text(json.dumps(found))


def _norm(parameters: Iterable[nn.Parameter]) -> float:
    gradients = [each.grad for each in parameters if each.grad is not None]
    return sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))


def data() -> Any:
    """Return the rows of this rank as a data set; a list is one, though not by its type."""
    torch.manual_seed(1 + RANK)
    return list(torch.randn(STEPS * 2 * 4, 4))


class ByHand(LightningModule):
    """Lightning, where several optimizers are stepped by hand."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.reference, self.apart = Model(), Reference(), apart

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.model(batch)["loss"])
        self.reference.note(self.model)
        if not self.apart:
            nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        for optimizer in optimizers:
            if self.apart:
                self.clip_gradients(optimizer, LIMIT, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> list[Optimizer]:
        return optimizers_of(self.model)


def train_with_lightning(directory: Path, *, apart: bool) -> None:
    trainer = LightningTrainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=2 * STEPS,  # it counts the steps of both
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory),
    )
    module = ByHand(apart)
    with watched(directory, RANK, 2):
        trainer.fit(module, DataLoader(data(), batch_size=4))
    module.reference.write(directory)


class NotingTrainer(Trainer):
    """transformers' Trainer with two optimizers in one; notes the gradients before clipping."""

    def __init__(self, both: Callable[[nn.Module], Optimizer], **options) -> None:
        super().__init__(**options)
        self.both, self.reference = both, Reference()

    def create_optimizer(self, model=None) -> Optimizer:
        self.optimizer = self.both(self.model)
        return self.optimizer

    def training_step(self, *arguments, **options) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.reference.note(self.model)
        return loss


def train_with_transformers(directory: Path, both: Callable[[nn.Module], Optimizer]) -> None:
    trainer = NotingTrainer(
        both,
        model=Model(),
        args=TrainingArguments(
            output_dir=str(directory),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            max_grad_norm=LIMIT,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=data() * 2,
        data_collator=lambda rows: {"inputs": torch.stack(rows)},
    )
    with watched(directory, RANK, 2):
        trainer.train()
    trainer.reference.write(directory)


def train_with_accelerate(directory: Path) -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator, reference = Accelerator(cpu=True), Reference()
    model = Model()
    wrapped, *optimizers = accelerator.prepare(model, *optimizers_of(model))
    with watched(directory, RANK, 2):
        for batch in torch.stack(data()).split(4)[:STEPS]:
            for optimizer in optimizers:
                optimizer.zero_grad()
            accelerator.backward(wrapped(batch)["loss"])
            reference.note(model)
            accelerator.clip_grad_norm_(wrapped.parameters(), LIMIT)
            for optimizer in optimizers:
                optimizer.step()
    reference.write(directory)


def main(directory: Path) -> None:
    train_with_transformers(directory / "transformers", Both)
    train_with_transformers(directory / "transformers_without_hooks", BothWithoutHooks)
    train_with_accelerate(directory / "accelerate")
    train_with_lightning(directory / "lightning", apart=False)
    train_with_lightning(directory / "lightning_clipped_apart", apart=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    if dist.is_initialized():
        end_process_group()
