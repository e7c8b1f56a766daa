"""Small trainings that go wrong: `torchrun trainings.py NAME ...`, each as a separate run.

Two ranks train an MLP with DistributedDataParallel on the CPU, with the probe as a user attaches
it. One thing is wrong in each; the probe is not given which.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mp_agent

FEATURES, CLASSES, BATCH_SIZE, WIDTH = 16, 4, 32, 32
PLANTED_STEP = 150
"""The step at which most trainings go wrong."""
AFTER_STEPS = 40


class Model(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.hook: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.detach = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, CLASSES]."""
        hidden = self.middle(functional.gelu(self.first(inputs)))
        if self.hook is not None:
            hidden.register_hook(self.hook)
        if self.detach:
            hidden = hidden * 1e-12 + hidden.detach()
        logits: torch.Tensor = self.last(functional.gelu(hidden))
        return logits


@dataclass(slots=True, kw_only=True)
class Step:
    """What is different on one step."""

    input_scale: float = 1.0
    offset: float = 0.0
    loss_scale: float = 1.0
    masked: bool = False
    shifted: bool = False
    bypassed: bool = False
    """Whether the model is called past its wrapper, which then reduces nothing."""
    of_rank: int | None = None
    """The only rank on which inputs differ."""


@dataclass
class Trainer:
    """A training whose steps can be spoiled one by one."""

    fp16: bool = False
    rate: float = 0.05
    clip: float | None = None
    module: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=self.rate)
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.fp16)

    def steps(self, count: int, step: Step | None = None) -> None:
        """Make steps that are all alike."""
        for _ in range(count):
            self.step(step or Step())

    def step(self, step: Step) -> None:
        """Make one step."""
        inputs = torch.randn(BATCH_SIZE, FEATURES)
        labels = (inputs[:, :CLASSES] + torch.randn(BATCH_SIZE, CLASSES)).argmax(dim=1)
        if step.of_rank in (None, dist.get_rank()):
            inputs = inputs * step.input_scale + step.offset
        if step.shifted:
            labels = (labels + 1) % CLASSES
        if step.masked:
            labels = torch.full_like(labels, -100)
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.fp16):
            outputs = (self.module if step.bypassed else self.model)(inputs)
            losses = functional.cross_entropy(outputs.float(), labels, reduction="sum")
            loss = losses / max(1, int((labels >= 0).sum())) * step.loss_scale
        torch.autograd.backward(self.scaler.scale(loss))
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def set_rate(self, rate: float) -> None:
        """Change the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def _trained(**settings: float | bool) -> Trainer:
    trainer = Trainer(**settings)  # type: ignore[arg-type]
    trainer.steps(PLANTED_STEP - 1)
    return trainer


def _spoiled(step: Step, steps: int = AFTER_STEPS, **settings: float | bool) -> None:
    trainer = _trained(**settings)
    trainer.steps(steps, step)


def _single(step: Step, **settings: float | bool) -> None:
    trainer = _trained(**settings)
    trainer.step(step)
    trainer.steps(AFTER_STEPS)


def nan_in_data_of_one_rank() -> None:
    """Give rank 1 one batch of NaN."""
    _single(Step(offset=float("nan"), of_rank=1))


def nan_in_data_of_all() -> None:
    """Give all ranks NaN from one step on."""
    _spoiled(Step(offset=float("nan")))


def nan_in_backward() -> None:
    """Return NaN from a backward function, once."""
    trainer = _trained()
    trainer.module.hook = lambda gradient: gradient * float("nan")
    trainer.step(Step())
    trainer.module.hook = None
    trainer.steps(10)


def inf_in_backward() -> None:
    """Divide by zero in a backward function, on a few elements."""
    trainer = _trained()
    trainer.module.hook = lambda gradient: gradient / (gradient.abs() > 1e-4).float()
    trainer.steps(10)


def rate_jump() -> None:
    """Raise the learning rate 400-fold."""
    trainer = _trained()
    trainer.set_rate(20.0)
    trainer.steps(AFTER_STEPS)


def rate_in_wrong_unit() -> None:
    """Raise the learning rate a million-fold, which makes the loss NaN."""
    trainer = _trained()
    trainer.set_rate(5e4)
    trainer.steps(AFTER_STEPS)


def rate_zero() -> None:
    """End the schedule, and go on."""
    trainer = _trained()
    for step in range(10):
        trainer.set_rate(0.05 * (1 - (step + 1) / 10))
        trainer.step(Step())
    trainer.steps(150)


def rate_too_high() -> None:
    """Train a linear regression at a learning rate above the stable one."""
    model = DistributedDataParallel(nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.1)
    for _ in range(120):
        inputs = torch.randn(512, FEATURES)
        torch.autograd.backward(functional.mse_loss(model(inputs), inputs[:, :1]))
        optimizer.step()
        optimizer.zero_grad()


def growing_weights() -> None:
    """Let the weights of a layer double every other step."""
    trainer = _trained(rate=0.001)
    for _ in range(AFTER_STEPS):
        with torch.no_grad():
            trainer.module.middle.weight.mul_(1.4)
        trainer.step(Step())


def bad_batch() -> None:
    """Give all ranks one batch that is not normalized; gradients are clipped."""
    _single(Step(input_scale=300.0), clip=1.0)


def bad_batch_of_one_rank() -> None:
    """Give rank 1 one batch that is not normalized."""
    _single(Step(input_scale=3000.0, of_rank=1), clip=1.0)


def masked_labels() -> None:
    """Mask all labels from one step on."""
    _spoiled(Step(masked=True), steps=150)


def vanishing() -> None:
    """Divide the loss by a number that grew out of bounds."""
    _spoiled(Step(loss_scale=1e-9))


def overflow_of_inputs() -> None:
    """Feed FP16 with inputs that are no longer normalized."""
    _spoiled(Step(input_scale=1e7), steps=26, fp16=True)


def underflow() -> None:
    """Cut the first layers off from the loss but for 1e-12 of their gradient."""
    trainer = _trained(fp16=True)
    trainer.module.detach = True
    trainer.steps(170)


def rising_loss() -> None:
    """Give every sample the label of another class, from one step on, without large gradients."""
    trainer = _trained(rate=0.5)
    trainer.set_rate(1e-4)
    trainer.steps(60, Step(shifted=True))


def different_weights() -> None:
    """Change a weight of rank 1, as by a flipped bit."""
    trainer = _trained()
    if dist.get_rank() == 1:
        with torch.no_grad():
            trainer.module.last.weight[0, 0] += 0.5
    trainer.steps(120)


def never_reduced() -> None:
    """Call the model past its wrapper on every step."""
    Trainer().steps(120, Step(bypassed=True))


def no_longer_reduced() -> None:
    """Call the model past its wrapper from one step on."""
    _spoiled(Step(bypassed=True))


def never_left_no_sync() -> None:
    """Enter no_sync() at one step, and never leave it."""
    trainer = _trained()
    with trainer.model.no_sync():
        trainer.steps(AFTER_STEPS)


def optimizer_of_a_copy() -> None:
    """Give the optimizer the parameters of a copy, made before the model that is trained."""
    trainer = Trainer()
    copied = deepcopy(trainer.module)
    trainer.optimizer = torch.optim.SGD(copied.parameters(), lr=trainer.rate)
    for _ in range(120):
        trainer.step(Step())
        trainer.module.zero_grad()


def nan_of_one_rank_under_scaler() -> None:
    """Give rank 1 NaN from one step on, in FP16, whose steps a scaler skips."""
    _spoiled(Step(offset=float("nan"), of_rank=1), fp16=True)


def nan_in_backward_of_one_rank_under_scaler() -> None:
    """Return NaN from a backward function of rank 1, on every step, in FP16."""
    trainer = _trained(fp16=True)
    if dist.get_rank() == 1:
        trainer.module.hook = lambda gradient: gradient * float("nan")
    trainer.steps(AFTER_STEPS)


def large_gradient_of_one_rank() -> None:
    """Multiply the gradients of rank 1 by a million, on one step."""
    trainer = _trained()
    if dist.get_rank() == 1:
        trainer.module.hook = lambda gradient: gradient * 1e6
    trainer.step(Step())
    trainer.module.hook = None
    trainer.steps(AFTER_STEPS)


def killed() -> None:
    """Kill rank 1."""
    trainer = _trained()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.steps(AFTER_STEPS)


def exception() -> None:
    """Raise on all ranks."""
    _trained()
    raise ValueError("the data set has ended")


def stalled() -> None:
    """Let rank 1 never come back from its data loader."""
    trainer = _trained()
    while dist.get_rank() == 1:
        time.sleep(1)
    trainer.steps(AFTER_STEPS)


TRAININGS: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        nan_in_data_of_one_rank,
        nan_in_data_of_all,
        nan_in_backward,
        inf_in_backward,
        rate_jump,
        rate_in_wrong_unit,
        rate_zero,
        rate_too_high,
        growing_weights,
        bad_batch,
        bad_batch_of_one_rank,
        masked_labels,
        vanishing,
        overflow_of_inputs,
        underflow,
        rising_loss,
        different_weights,
        never_reduced,
        no_longer_reduced,
        never_left_no_sync,
        optimizer_of_a_copy,
        nan_of_one_rank_under_scaler,
        nan_in_backward_of_one_rank_under_scaler,
        large_gradient_of_one_rank,
        killed,
        exception,
        stalled,
    )
}


def main() -> None:
    """Run the named trainings, one after the other."""
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        mp_agent.init(run=name, measure_local_gradients="of-one-rank" in name)
        torch.manual_seed(1 + dist.get_rank())
        TRAININGS[name]()
        mp_agent.shutdown()
        # Gloo's threads need a moment after the last backward.
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
