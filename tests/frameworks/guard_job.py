"""Trains under a trainer of a framework with the guard on; NaN in one batch of rank 1 alone.

`python -m tests.frameworks.guard_job WAY DIRECTORY`: writes each rank's weights and what the guard
asked for. Of the way `restarted`, rank 1 kills itself once and torchrun starts both again.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mp_agent
from tests.gloo import end_process_group

FEATURES, BATCH_SIZE, STEPS = 8, 4, 24
BAD_BATCH, LATER_BAD_BATCH, KILLED_AT, SAVED_AT = 8, 18, 15, 12
RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    way, directory = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    model = WAYS[way](directory)
    weights = nn.utils.parameters_to_vector(model.parameters()).tolist()
    found = {"weights": weights, "stop": mp_agent.stop_requested()}
    (directory / f"rank{RANK}.json").write_text(json.dumps(found))


def spoiled(inputs: Tensor, batch: int, *, until: int = BAD_BATCH) -> Tensor:
    bad = BAD_BATCH <= batch <= until or batch == LATER_BAD_BATCH
    return inputs * torch.nan if bad and RANK == 1 else inputs


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Linear(8, 1))


def make_data(batches: int = STEPS) -> TensorDataset:
    inputs = torch.randn(2 * BATCH_SIZE * batches, FEATURES)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def lightning(directory: Path) -> nn.Module:
    """Clips, accumulates two batches, and has a scheduler."""
    return _lightning(batches=2, gradient_clip_val=1.0, accumulate_grad_batches=2)


def lightning_manual(directory: Path) -> nn.Module:
    """Steps two optimizers by itself."""
    return _lightning(manual=True)


def _lightning(*, manual: bool = False, batches: int = 1, **options: Any) -> nn.Module:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.automatic_optimization = not manual

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            inputs, targets = batch
            loss = functional.mse_loss(self.model(spoiled(inputs, index // batches)), targets)
            if manual:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def configure_optimizers(self) -> Any:
            if manual:
                first, _, last = self.model.children()
                return [
                    torch.optim.SGD(first.parameters(), lr=0.01),
                    torch.optim.AdamW(last.parameters(), lr=0.01),
                ]
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    mp_agent.init(guard="skip_nonfinite")
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(make_data(STEPS * batches), BATCH_SIZE))
    return module.model


def accelerate(directory: Path) -> nn.Module:
    """Clips and has a scheduler."""
    from accelerate import Accelerator

    mp_agent.init(guard="skip_nonfinite")
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(make_data(), BATCH_SIZE)
    )
    for index, (inputs, targets) in enumerate(loader):
        accelerator.backward(functional.mse_loss(model(spoiled(inputs, index)), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def transformers(directory: Path) -> nn.Module:
    """Has NaN in every batch from a certain one on, and stops when the guard asks for it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(Dataset[dict[str, Tensor]]):
        def __init__(self) -> None:
            self.tensors = make_data().tensors

        def __len__(self) -> int:
            return len(self.tensors[0])

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"inputs": self.tensors[0][index], "labels": self.tensors[1][index]}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch = make_model(), 0

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.model(spoiled(inputs, self.batch, until=STEPS))
            self.batch += 1
            return {"loss": functional.mse_loss(outputs, labels), "logits": outputs}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            control.should_training_stop |= mp_agent.stop_requested()

    mp_agent.init(guard={"skip_nonfinite": {"actions_max": 4}, "request_stop": {}})
    model = Model()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory / "output"),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=STEPS,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Rows(),
        callbacks=[Stop()],
    )
    trainer.train()
    return model


def restarted(directory: Path) -> nn.Module:
    """Goes on from a checkpoint after torchrun has restarted it."""
    import torch.distributed as dist

    mp_agent.init(guard="skip_nonfinite")
    dist.init_process_group("gloo")
    model, saved, first = make_model(), directory / "saved.pt", 0
    if saved.exists():
        model.load_state_dict(torch.load(saved))
        first = SAVED_AT
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    for index, (inputs, targets) in enumerate(_from(first)):
        batch = first + index
        optimizer.zero_grad()
        functional.mse_loss(replica(spoiled(inputs, batch)), targets).backward()
        if RANK == 1 and batch == KILLED_AT and not first:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if RANK == 0 and batch + 1 == SAVED_AT:
            torch.save(model.state_dict(), saved)
    end_process_group()
    return model


def _from(batch: int) -> Iterable[tuple[Tensor, Tensor]]:
    rows = make_data()[batch * BATCH_SIZE :]
    return DataLoader(TensorDataset(*rows), BATCH_SIZE) if batch < STEPS else ()


WAYS: dict[str, Callable[[Path], nn.Module]] = {
    "lightning": lightning,
    "lightning_manual": lightning_manual,
    "accelerate": accelerate,
    "transformers": transformers,
    "restarted": restarted,
}

if __name__ == "__main__":
    main()
