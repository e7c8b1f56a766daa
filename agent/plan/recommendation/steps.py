"""What a few FP32 steps show: gradients, activations and outputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import fsum, isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.errors import AdviceError
from mp_agent.plan.execution.errors import as_real, inexact
from mp_agent.plan.execution.training import (
    PlannedTraining,
    Workload,
    storages_of,
    trained_parameters,
)
from mp_agent.plan.precision_plan import PrecisionPlan
from mp_agent.plan.recommendation.choose import ExponentCounts

_OFFSET = 1100
"""Added to exponents, so that none is negative; FP64 begins at -1074."""


def count_exponents(tensor: Tensor) -> ExponentCounts:
    """Return how many elements have which floor(log2) of their magnitude.

    Of a sparse tensor, the elements that it stores.
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.abs().flatten()
    finite = values[values.isfinite()]
    nonzero = finite[finite > 0]
    if nonzero.dtype is not torch.float64:
        nonzero = nonzero.float()
    exponents = torch.frexp(nonzero).exponent.long() - 1
    found = torch.bincount(exponents + _OFFSET).tolist() if exponents.numel() else []
    return ExponentCounts(
        counts={index - _OFFSET: count for index, count in enumerate(found) if count},
        zeros=finite.numel() - nonzero.numel(),
        nonfinite=values.numel() - finite.numel(),
        abs_max=float(finite.max()) if finite.numel() else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGradients:
    """What the steps showed; gradients are unscaled, before clipping."""

    parameters: ExponentCounts
    outputs: ExponentCounts
    """Gradients of the outputs of modules that have more than one element."""
    norms: tuple[float, ...]
    losses: tuple[float, ...]
    stale_ratio: float | None
    """Share of AdamW's updates after which a weight in BF16 is the same; None without updates."""


class GradientMeasurement:
    """Trains a copy in FP32 with AdamW and counts its gradients."""

    def __init__(self, workload: Workload, learning_rate: float) -> None:
        plan = PrecisionPlan(precision="fp32", device="cpu")
        self._training = PlannedTraining(workload, plan, learning_rate)
        self._workload = workload
        self._trained = trained_parameters(self._training.model)
        self._parameters = ExponentCounts()
        self._outputs = ExponentCounts()
        self._norms: list[float] = []
        self._losses: list[float] = []
        self._updates = self._stale = 0
        for module in self._training.model.modules():
            module.register_forward_hook(self._watch)

    def run(self, steps: int, on_step: Callable[[int], None]) -> MeasuredGradients:
        """Train for some steps. Raises AdviceError when the loss or a gradient is not finite."""

        def body() -> None:
            for step in range(steps):
                self._step(step)
                on_step(step + 1)

        self._training.run(body)
        return MeasuredGradients(
            parameters=self._parameters,
            outputs=self._outputs,
            norms=tuple(self._norms),
            losses=tuple(self._losses),
            stale_ratio=self._stale / self._updates if self._updates else None,
        )

    def _step(self, step: int) -> None:
        training = self._training
        loss = training.forward(training.inputs(self._workload.batch(step)))
        self._losses.append(float(loss.detach()))
        self._require(isfinite(self._losses[-1]), step, f"the loss is {self._losses[-1]}")
        if not loss.requires_grad:
            raise AdviceError("loss: depends on no parameter that is trained")
        loss.backward()  # type: ignore[no-untyped-call]
        before = [as_real(one.detach()).clone() for one in self._trained]
        self._count(step)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        self._compare_updates(before)

    def _count(self, step: int) -> None:
        squares = []
        for parameter in self._trained:
            if parameter.grad is None:
                continue
            counted = count_exponents(parameter.grad)
            self._require(counted.nonfinite == 0, step, "a gradient is NaN or Inf")
            self._parameters = self._parameters.plus(counted)
            squares.append(float(as_real(parameter.grad.detach()).double().square().sum()))
        self._norms.append(sqrt(fsum(squares)))

    def _require(self, finite: bool, step: int, problem: str) -> None:
        if not finite:
            raise AdviceError(
                f"model: {problem} at step {step + 1} in FP32 already; no precision repairs that"
            )

    def _compare_updates(self, before: list[Tensor]) -> None:
        """Count the updates that would leave a weight in BF16 as it was."""
        for old, parameter in zip(before, self._trained, strict=True):
            update = as_real(parameter.detach()) - old
            low = old.bfloat16()
            moved = update != 0
            stale = moved & ((low.float() + update).bfloat16() == low)
            self._updates += int(moved.sum())
            self._stale += int(stale.sum())

    def _watch(self, module: nn.Module, args: Any, outputs: Any) -> None:
        for tensor in inexact(outputs).values():
            # A loss, whose gradient is 1, stays in FP32 in every precision that is tried.
            if tensor.requires_grad and tensor.numel() > 1:
                tensor.register_hook(self._count_output)  # type: ignore[no-untyped-call]

    def _count_output(self, gradient: Tensor) -> None:
        self._outputs = self._outputs.plus(count_exponents(gradient))


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

    training.run(body)
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
