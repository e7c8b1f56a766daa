"""What is trained: a model, its batches and its loss; the model itself is never run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mp_agent.compare.execution.copies import copy_of, unwrapped
from mp_agent.compare.execution.task import Loss, loss_of
from mp_agent.compare.measure.trees import tensors_of
from mp_agent.errors import AdviceError


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with what it is trained on."""

    model: nn.Module
    """As the user gave it, without wrappers."""
    batches: tuple[Any, ...]
    loss: Loss
    device: torch.device
    notes: tuple[str, ...] = ()

    def batch(self, step: int) -> Any:
        """Return the batch of a step; they come again once all have been used."""
        return self.batches[step % len(self.batches)]


def workload_of(model: Any, batch: Any, loss: Any, steps: int) -> Workload:
    """Return what is trained.

    batch: one batch for every step; a DataLoader or an iterator gives one per step, at most
    `steps` of them. Raises AdviceError, and CompareError for models that cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise AdviceError(f"model: {type(model).__name__} is not a torch.nn.Module")
    inner, notes = unwrapped(model)
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        raise AdviceError(f"model: {type(inner).__name__} has no parameter that is trained")
    batches = batches_of(batch, steps)
    tensors = [*inner.parameters(), *inner.buffers(), *(one for _, one in tensors_of(batches))]
    devices = list(dict.fromkeys(one.device for one in tensors))
    if len(devices) > 1:
        raise AdviceError(f"model: is on several devices: {', '.join(map(str, devices))}")
    return Workload(inner, batches, loss_of(loss), devices[0], notes)


def batches_of(batch: Any, steps: int) -> tuple[Any, ...]:
    """Return the batches that a value stands for. Raises AdviceError for no batch."""
    if not isinstance(batch, DataLoader | Iterator):
        return (batch,)
    batches = tuple(islice(iter(batch), steps))
    if not batches:
        raise AdviceError(f"batch: the {type(batch).__name__} is empty")
    return batches


def trainable_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with floating-point weights and buffers of its own, in a dtype."""
    copied = copy_of(model, lambda name: dtype)
    shared = {one.data_ptr() for one in model.parameters()}
    for parameter in copied.parameters():
        if parameter.data_ptr() in shared:
            parameter.data = parameter.data.clone()
    return copied


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer gets."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def required_positive(**values: Any) -> None:
    """Raise AdviceError, naming the argument, for values that are not positive numbers."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise AdviceError(f"{name}: {value!r} is not a number")
        if not 0 < value < float("inf"):
            raise AdviceError(f"{name}: {value!r} is not a positive number")


def required_count(least: int, **values: Any) -> None:
    """Raise AdviceError, naming the argument, for values that are no whole number from `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise AdviceError(f"{name}: {value!r} is not a whole number from {least} up")


def storages_of(value: Any) -> set[int]:
    """Return the addresses of the storages of the tensors in a value, a module among them."""
    if isinstance(value, nn.Module):
        tensors: list[Tensor] = [*value.parameters(), *value.buffers()]
    elif isinstance(value, Mapping | tuple | list | Tensor):
        tensors = [one for _, one in tensors_of(value)]
    else:
        tensors = []
    return {one.untyped_storage().data_ptr() for one in tensors}
