"""A training step for a trial, and the step as a plan has it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.errors import AdviceError
from mp_agent.plan.execution.calls import Loss, fp32_products, in_plain_thread, loss_of, scalar
from mp_agent.plan.execution.errors import tensors_of
from mp_agent.plan.execution.precision import LOSS, cast, to_dtype
from mp_agent.plan.execution.session import (
    batches_of,
    copy_of,
    devices_of,
    uncompiled,
    unwrapped,
)
from mp_agent.plan.precision_plan import AUTOCAST, PrecisionPlan


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with what it is trained on."""

    model: nn.Module
    """The model as the user gave it, without wrappers."""
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
    if not (batches := batches_of(batch, steps)):
        raise AdviceError(f"batch: the {type(batch).__name__} is empty")
    devices = devices_of(inner, batches)
    if len(devices) > 1:
        raise AdviceError(f"model: is on several devices: {', '.join(map(str, devices))}")
    if any(map(_has_sparse_gradients, inner.modules())):
        notes = (*notes, "sparse gradients were made dense: AdamW takes no others")
    return Workload(inner, batches, loss_of(loss), devices[0], notes)


def _has_sparse_gradients(module: nn.Module) -> bool:
    return getattr(module, "sparse", False) is True


def _make_gradient_dense(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to_dense()


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


_DTYPES: Mapping[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class PlannedTraining:
    """A copy of a model that is trained by a plan with AdamW.

    Raises AdviceError, naming the module, when the plan keeps one that the model does not have.
    """

    def __init__(self, workload: Workload, plan: PrecisionPlan, learning_rate: float) -> None:
        self.plan = plan
        dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
        self.model = trainable_copy(workload.model, dtype)
        self._input_dtype = dtype
        self._loss = workload.loss
        self._device = workload.device
        self._keep()
        for module in filter(_has_sparse_gradients, self.model.modules()):
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_make_gradient_dense)  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(
            trained_parameters(self.model),
            lr=learning_rate,
            betas=(0.9, plan.adam_beta2),
            eps=plan.adam_epsilon,
        )
        self.scaler = (
            torch.amp.GradScaler(self._device.type, init_scale=plan.loss_scale)
            if plan.loss_scale is not None
            else None
        )

    def inputs(self, batch: Any) -> Any:
        """Return a batch with new tensors, floating-point ones in the dtype of the weights."""
        return cast(batch, self._input_dtype)

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch that `inputs` returned."""
        with nullcontext() if LOSS in self.plan.keep_fp32 else self._autocast():
            loss = scalar(self._loss(self.model, batch))
        # Within another autocast, such as a disabled one, the end of this one does not empty the
        # cache: the next step would still use the 16-bit copies of these weights.
        torch.clear_autocast_cache()
        return loss

    def update(self, loss: Tensor) -> None:
        """Run the backward pass, clip, and step the optimizer; gradients are then None."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def products(self) -> AbstractContextManager[None]:
        """Return a context with the settings of FP32 products that the plan needs."""
        return fp32_products(tf32=self.plan.precision == "tf32")

    def run(self, body: Callable[[], None]) -> None:
        """Run a body with this copy on its own thread, then `close`; raise what it raises."""
        try:
            with self.products(), uncompiled():
                in_plain_thread(self._device, body)
        finally:
            self.close()

    def close(self) -> None:
        """Unwrap the modules, so that nothing refers to the copy in a circle."""
        for module in self.model.modules():
            module.__dict__.pop("forward", None)

    def _autocast(self) -> AbstractContextManager[Any]:
        name = AUTOCAST.get(self.plan.precision)
        return nullcontext() if name is None else torch.autocast(self._device.type, _DTYPES[name])

    def _keep(self) -> None:
        modules = dict(self.model.named_modules())
        for name in self.plan.keep_fp32:
            if name == LOSS:
                self.model.forward = self._low(self.model.forward)
            elif name not in modules:
                raise AdviceError(f"plan: keep_fp32 names {name!r}, which the model does not have")
            else:
                modules[name].forward = self._kept(modules[name].forward)

    def _low(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def low(*args: Any, **kwargs: Any) -> Any:
            with self._autocast():
                outputs = forward(*args, **kwargs)
            return to_dtype(outputs, torch.float32)

        return low

    def _kept(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def kept(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self._device.type, enabled=False):
                return forward(*to_dtype(args, torch.float32), **to_dtype(kwargs, torch.float32))

        return kept
