"""Measures the bytes that a forward pass by a plan saves for its backward pass."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.training.planned import PlannedTraining
from mp_agent.advice.training.workload import Workload, storages_of
from mp_agent.compare.execution.session import uncompiled
from mp_agent.compare.execution.task import in_plain_thread


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """What a forward pass holds until its backward pass, except for the weights themselves."""

    activations_bytes: int
    cast_elements: int
    """Elements of parameters that autocast has cast to 16 bits."""


@dataclass(slots=True)
class _Storages:
    """Storages by address; held, so that no address is used twice."""

    held: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.held.setdefault(storage.data_ptr(), storage)


def measure_saved(workload: Workload, plan: PrecisionPlan) -> SavedBytes:
    """Return what one forward pass of a copy on the first batch saves, by a plan.

    The batch and the weights are left out; a storage that several operations save counts once.
    """
    training = PlannedTraining(workload, plan, learning_rate=1.0)
    saved, casts = _Storages(), _Casts(training)
    own = storages_of(training.model)

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    def body() -> None:
        batch = training.inputs(workload.batch(0))
        own.update(storages_of(batch))
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, casts:
            loss = training.forward(batch)
        # Only now may what it saved be freed.
        del loss

    try:
        with training.products(), uncompiled():
            in_plain_thread(workload.device, body)
    finally:
        training.close()
    known = own | casts.storages.held.keys()
    activations = (one.nbytes() for key, one in saved.held.items() if key not in known)
    return SavedBytes(sum(activations), casts.elements)


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the copies of parameters that autocast makes."""

    def __init__(self, training: PlannedTraining) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = _Storages()
        self.elements = 0
        self._parameters = {one.data_ptr() for one in training.model.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ == "_to_copy"
            and result.dtype in (torch.float16, torch.bfloat16)
            and args[0].data_ptr() in self._parameters
        ):
            self.storages.add(result)
            self.elements += result.numel()
        return result
