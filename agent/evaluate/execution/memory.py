"""Measures the peak memory of training steps."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.advice.plan import PrecisionPlan
from mp_agent.advice.training.planned import PlannedTraining
from mp_agent.advice.training.workload import Workload
from mp_agent.compare.execution.session import uncompiled
from mp_agent.compare.execution.task import in_plain_thread
from mp_agent.compare.measure.trees import tensors_of

ALLOCATOR = "CUDA's allocator"
LIVE_TENSORS = "live tensors, without what operations need while they run"
_STEPS = 2
"""The optimizer's state is there from the end of the first on."""


def measure_peak(workload: Workload, plan: PrecisionPlan, learning_rate: float) -> tuple[int, str]:
    """Return the peak in bytes of two training steps of a copy by a plan, and what measured it.

    Weights, gradients, optimizer state, activations and the batch; not the model itself.
    """
    on_cuda = workload.device.type == "cuda"
    before = torch.cuda.memory_allocated(workload.device) if on_cuda else 0
    training = PlannedTraining(workload, plan, learning_rate)
    live = LiveMemory([*training.model.parameters(), *training.model.buffers()])

    def body() -> None:
        for step in range(_STEPS):
            training.update(training.forward(training.inputs(workload.batch(step))))

    def watched() -> None:
        with live:
            body()

    if on_cuda:
        torch.cuda.reset_peak_memory_stats(workload.device)
    try:
        with training.products(), uncompiled():
            in_plain_thread(workload.device, body if on_cuda else watched)
    finally:
        training.close()
    if on_cuda:
        return torch.cuda.max_memory_allocated(workload.device) - before, ALLOCATOR
    return live.peak_bytes, LIVE_TENSORS


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of the tensors that operations of this thread make, until freed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._follow(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for _, tensor in tensors_of(result):
            self._follow(tensor)
        return result

    def _follow(self, tensor: Tensor) -> None:
        if tensor.is_sparse:
            for part in (tensor._values(), tensor._indices()):
                self._follow(part)
            return
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._storages:
            return

        def freed(reference: Any) -> None:
            self._storages.pop(key, None)
            self.live_bytes -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
