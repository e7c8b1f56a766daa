"""Small jobs that go wrong at a known place: `torchrun tests/agent/flight/job.py FACTS [KIND …]`.

One after the other, each as a separate run, named after its kind. Rank 0 writes what really
happened, seen by torch alone, to `<FACTS>/<KIND>.json`. Without a kind, one that does not end.
"""

import json
import os
import signal
import sys
import time
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mp_agent

FEATURES, CLASSES, BATCH_SIZE = 16, 4, 32
NAN_STEP, BACKWARD_STEP, STORM_STEP, KILL_STEP = 41, 37, 50, 43
STORM_STEPS = 26


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, CLASSES)
        self.spoil = False
        self.factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(functional.gelu(self.first(inputs)))
        if self.spoil:
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        if self.factor != 1.0:
            factor = self.factor
            hidden.register_hook(lambda gradient: gradient * factor)
        logits: torch.Tensor = self.last(functional.gelu(hidden))
        return logits


class Trainer:
    def __init__(self, *, fp16: bool) -> None:
        self.model = DistributedDataParallel(Model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", enabled=fp16)
        self.fp16 = fp16

    def step(self, *, input_scale: float = 1.0, offset: float = 0.0) -> None:
        inputs = torch.randn(BATCH_SIZE, FEATURES)
        labels = (inputs[:, :CLASSES] + torch.randn(BATCH_SIZE, CLASSES)).argmax(dim=1)
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.fp16):
            outputs = self.model(inputs * input_scale + offset)
            loss = functional.cross_entropy(outputs.float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def clean() -> dict[str, object]:
    trainer = Trainer(fp16=True)
    for _ in range(120):
        trainer.step()
    return {}


def calibrating() -> dict[str, object]:
    """The scale starts far too high and finds its place in some twenty skipped steps."""
    trainer = Trainer(fp16=True)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**36)
    for _ in range(80):
        trainer.step()
    return {}


def explosion() -> dict[str, object]:
    """Linear regression at a learning rate above the one at which it is stable."""
    model = DistributedDataParallel(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.1)
    norms: list[float] = []
    layers: list[str] = []
    # Not for long after it: a ring holds four tables of layers.
    while not norms or norms[-1] < 1000.0:
        inputs = torch.randn(512, FEATURES)
        functional.mse_loss(model(inputs), inputs[:, :1]).backward()
        named = {name: float(p.grad.norm()) for name, p in model.module.named_parameters()}
        norms.append(sum(norm**2 for norm in named.values()) ** 0.5)
        layers.append(max(named, key=lambda name: named[name]))
        optimizer.step()
        optimizer.zero_grad()
    first = next(index for index, norm in enumerate(norms) if norm > 100)
    return {"step": first + 1, "layer": layers[first], "norm": norms[first]}


def overflow_storm() -> dict[str, object]:
    """The inputs are no longer normalised: FP16 ends at 65504."""
    trainer = Trainer(fp16=True)
    for number in range(1, STORM_STEP + STORM_STEPS):
        trainer.step(input_scale=1.0 if number < STORM_STEP else 1e7)
    return {"step": STORM_STEP, "scale": trainer.scaler.get_scale()}


def nan_on_one_rank() -> dict[str, object]:
    trainer = Trainer(fp16=False)
    for number in range(1, NAN_STEP + 12):
        damaged = number == NAN_STEP and dist.get_rank() == 1
        trainer.step(offset=float("nan") if damaged else 0.0)
    return {"step": NAN_STEP}


def nan_in_backward() -> dict[str, object]:
    trainer = Trainer(fp16=False)
    for number in range(1, BACKWARD_STEP + 8):
        trainer.model.module.spoil = number == BACKWARD_STEP
        trainer.step()
    return {"step": BACKWARD_STEP, "layer": "middle.bias"}


def never_reduced() -> dict[str, object]:
    """The model is called past its wrapper, so that nothing reduces its gradients."""
    trainer = Trainer(fp16=False)
    wrapper = trainer.model
    trainer.model = wrapper.module
    for _ in range(30):
        trainer.step()
    return {"wrapper": type(wrapper).__name__}


def optimizer_of_a_copy() -> dict[str, object]:
    trainer = Trainer(fp16=False)
    copied = deepcopy(trainer.model.module)
    trainer.optimizer = torch.optim.SGD(copied.parameters(), lr=0.05)
    for _ in range(100):
        trainer.step()
        trainer.model.zero_grad()
    return {}


def nan_of_one_rank_that_a_scaler_skips() -> dict[str, object]:
    trainer = Trainer(fp16=True)
    for number in range(1, NAN_STEP + 30):
        trainer.model.module.spoil = number >= NAN_STEP and dist.get_rank() == 1
        trainer.step()
    return {"step": NAN_STEP}


def one_rank_off() -> dict[str, object]:
    """Rank 1 multiplies the gradients of one step."""
    trainer = Trainer(fp16=False)
    for number in range(1, NAN_STEP + 8):
        trainer.model.module.factor = 1e6 if number == NAN_STEP and dist.get_rank() == 1 else 1.0
        trainer.step()
    return {"step": NAN_STEP}


def killed() -> dict[str, object]:
    """Rank 1 is killed before a step in whose backward pass rank 0 already waits for it."""
    trainer = Trainer(fp16=True)
    waiting = Path(sys.argv[1]) / "rank-0-waits"
    for number in range(1, 200):
        if number == KILL_STEP and dist.get_rank() == 0:
            last = trainer.model.module.last
            last.register_full_backward_pre_hook(lambda *_: waiting.touch())
        elif number == KILL_STEP:
            while not waiting.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step()
    return {}


def endless() -> None:
    trainer = Trainer(fp16=True)
    while True:
        trainer.step()
        time.sleep(0.01)


KINDS = {
    "clean": clean,
    "calibrating": calibrating,
    "explosion": explosion,
    "overflow-storm": overflow_storm,
    "nan-on-one-rank": nan_on_one_rank,
    "nan-in-backward": nan_in_backward,
    "never-reduced": never_reduced,
    "optimizer-of-a-copy": optimizer_of_a_copy,
    "nan-of-one-rank-that-a-scaler-skips": nan_of_one_rank_that_a_scaler_skips,
    "one-rank-off": one_rank_off,
    "killed": killed,
}


OF_ONE_RANK = ("nan-of-one-rank-that-a-scaler-skips", "one-rank-off")


def main() -> None:
    facts, kinds = Path(sys.argv[1]), sys.argv[2:]
    if not kinds:
        mp_agent.init()
    dist.init_process_group("gloo")
    for kind in kinds:
        mp_agent.init(run=kind, measure_local_gradients=kind in OF_ONE_RANK)
        torch.manual_seed(1 + dist.get_rank())
        found = KINDS[kind]()
        mp_agent.shutdown()
        if dist.get_rank() == 0:
            (facts / f"{kind}.json").write_text(json.dumps(found))
        # Gloo's threads need a moment after the last backward: see tests/gloo.py.
        time.sleep(0.1)
    if not kinds:
        endless()
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
