"""A training job for the end-to-end tests: `torchrun tests/e2e/job.py KIND`.

A small classifier learns noisy labels, data-parallel, so that its gradients stay of ordinary size
for as long as it runs. Each kind goes wrong by its own cause, or not at all.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mp_agent

FEATURES, CLASSES, BATCH_SIZE = 16, 4, 32
STEP_PAUSE_SECONDS = 0.01
"""Leaves the processor to the jobs that run at the same time."""
CALIBRATION_STEPS = 520
STORM_DELAY_SECONDS = 18.0
"""From the end of calibration to the storm: a little more than the scaled overflow_window."""
STORM_STEPS = 450
"""More than those after which a collapsed loss scale counts, fewer than for a very low one."""
QUIET_SECONDS = 26.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args().kind
    mp_agent.init()
    wait_until_watched()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    KINDS[kind]()
    time.sleep(0.3)  # see tests/gloo.py
    dist.destroy_process_group()


def wait_until_watched() -> None:
    """Wait for the file $WATCHED: how fast a job is scraped must not decide what is seen of it."""
    watched = os.environ.get("WATCHED")
    while watched and not os.path.exists(watched):
        time.sleep(STEP_PAUSE_SECONDS)


class Trainer:
    """Makes training steps: FP16 with a GradScaler when `scaler` is given, else FP32."""

    def __init__(
        self, *, scaler: torch.amp.GradScaler | None = None, learning_rate: float = 0.05
    ) -> None:
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, CLASSES))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.started = time.monotonic()
        self.steps = 0

    @property
    def seconds(self) -> float:
        """Time since the start, the same on all ranks, so that they stop at the same step."""
        elapsed = torch.tensor(time.monotonic() - self.started)
        dist.broadcast(elapsed, 0)
        return elapsed.item()

    def train_for(self, seconds: float, *, input_scale: float = 1.0) -> None:
        until = self.seconds + seconds
        while self.seconds < until:
            self.step(input_scale=input_scale)

    def train_until(self, path: Path) -> None:
        """Train until rank 0 sees the file; all ranks stop at the same step."""
        appeared = torch.zeros(1)
        while not appeared.item():
            self.step()
            appeared.fill_(path.exists())
            dist.broadcast(appeared, 0)

    def step(self, *, input_scale: float = 1.0, offset: float = 0.0) -> None:
        inputs = torch.randn(BATCH_SIZE, FEATURES)
        noise = torch.randn(BATCH_SIZE, CLASSES)
        labels = (inputs[:, :CLASSES] + noise).argmax(dim=1)
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.scaler.is_enabled()):
            outputs = self.model(inputs * input_scale + offset)
            loss = functional.cross_entropy(outputs.float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.steps += 1
        time.sleep(STEP_PAUSE_SECONDS)


def healthy() -> None:
    Trainer(scaler=torch.amp.GradScaler("cpu")).train_for(QUIET_SECONDS)


def brief() -> None:
    Trainer(scaler=torch.amp.GradScaler("cpu")).train_for(10.0)


def calibrating() -> None:
    """The scale starts far too high and finds its place in some twenty steps."""
    Trainer(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**36)).train_for(QUIET_SECONDS)


def explosion() -> None:
    """Linear regression at a learning rate just above the one at which it is stable."""
    model = DistributedDataParallel(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.04)
    for _ in range(300):
        inputs = torch.randn(4096, FEATURES)
        functional.mse_loss(model(inputs), inputs[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(2 * STEP_PAUSE_SECONDS)


def overflow_storm() -> None:
    """After a healthy stretch the inputs are no longer normalised: FP16 ends at 65504."""
    trainer = Trainer(scaler=torch.amp.GradScaler("cpu"))
    while trainer.steps < CALIBRATION_STEPS:
        trainer.step()
    trainer.train_for(STORM_DELAY_SECONDS)
    last = trainer.steps + STORM_STEPS
    while trainer.steps < last:
        trainer.step(input_scale=1e7)


def nonfinite_update() -> None:
    """One damaged sample on rank 1, and no scaler that would skip its step."""
    trainer = Trainer()
    trainer.train_for(4.0)
    trainer.step(offset=float("nan") if dist.get_rank() == 1 else 0.0)
    trainer.train_for(3.0)


def nonfinite_on_request() -> None:
    """Healthy until the file $GO.bad appears, without weights from then on, until $GO.end does."""
    trainer = Trainer()
    trainer.train_until(Path(os.environ["GO"] + ".bad"))
    trainer.step(offset=float("nan") if dist.get_rank() == 1 else 0.0)
    trainer.train_until(Path(os.environ["GO"] + ".end"))


def exception() -> None:
    Trainer(scaler=torch.amp.GradScaler("cpu")).train_for(6.0)
    raise RuntimeError("the data loader found no more files")


KINDS = {
    "healthy": healthy,
    "brief": brief,
    "calibrating": calibrating,
    "explosion": explosion,
    "overflow-storm": overflow_storm,
    "non-finite-update": nonfinite_update,
    "non-finite-on-request": nonfinite_on_request,
    "exception": exception,
}

if __name__ == "__main__":
    main()
