"""What the trainings with a silent error have in common: a small model, its data, the list."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

FEATURES, CLASSES, BATCH_SIZE, WIDTH = 16, 4, 32, 32
ONSET_STEP = 100
"""The first step with the error, of trainings that begin healthy."""
STEPS = 200
_STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class SilentError:
    """An error: since which step it is there, and in which group of the table it stands."""

    train: Callable[[bool], None]
    group: str
    onset: int

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.train.__name__.replace("_", "-")

    @property
    def text(self) -> str:
        """What is wrong, in a sentence."""
        return (self.train.__doc__ or "").strip()


GROUPS = ("loop", "modes", "optimizer", "ranks", "data", "numbers")
"""In the order of the table."""
ERRORS: dict[str, SilentError] = {}


def silent_error(
    group: str, onset: int = 1
) -> Callable[[Callable[[bool], None]], Callable[[bool], None]]:
    """Enter a training into the list; its docstring says what is wrong with it."""

    def add(train: Callable[[bool], None]) -> Callable[[bool], None]:
        found = SilentError(train, group, onset)
        ERRORS[found.name] = found
        return train

    return add


def steps_of(count: int = STEPS) -> Iterator[int]:
    """Yield the number of each step, from 1 on; a step takes some time."""
    for step in range(1, count + 1):
        yield step
        time.sleep(_STEP_SECONDS)


def make_model(*, dropout: float = 0.0, normalized: bool = False) -> nn.Sequential:
    """Return a model of inputs [B, FEATURES] to logits [B, CLASSES]."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH)]
    if normalized:
        layers.append(nn.BatchNorm1d(WIDTH))
    layers += [nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


CHANCE = torch.Generator()


def make_batch(size: int = BATCH_SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [size, FEATURES], and classes [size] that follow from them."""
    inputs = torch.randn(size, FEATURES, generator=CHANCE)
    return inputs, (inputs[:, :CLASSES] + 0.1 * inputs[:, CLASSES : 2 * CLASSES]).argmax(1)


def loss_of(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the loss of a batch, else of the next one."""
    inputs, classes = batch or make_batch()
    return functional.cross_entropy(model(inputs), classes)


def make_replicas(
    model: nn.Module | None = None, *, find_unused: bool = False
) -> DistributedDataParallel:
    """Return a model, else a new one, whose gradients DDP averages."""
    return DistributedDataParallel(model or make_model(), find_unused_parameters=find_unused)


def make_sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def average(model: nn.Module) -> None:
    """Average the gradients there are over the ranks, by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Make one step in the right order."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
