"""What is compared: a model, a batch and a loss; and one forward and backward pass of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.compare.execution.calls import Calls
from mp_agent.compare.execution.randomness import Randomness
from mp_agent.errors import CompareError

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A training step up to the gradients."""

    model: nn.Module
    """As the user gave it, without wrappers. Never run."""
    batch: Any
    loss: Loss
    device: torch.device
    loss_scale: float = 1.0

    def run(self, calls: Calls, scale: float) -> float:
        """Run the step on a copy of the model, and return its loss.

        scale: what the loss is multiplied by for the backward pass.
        """
        batch = calls.precision.cast(self.batch)
        with calls.tracing():
            loss = scalar(calls.call_loss(self.loss, calls.model, batch))
        if loss.requires_grad:
            with calls.precision.backward():
                (loss * scale).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach().double())


def loss_of(loss: Any) -> Loss:
    """Return a function of a model and a batch.

    None: the model's own loss. A module: the criterion of (inputs, target). Else the function
    itself. Raises CompareError for anything else.
    """
    if loss is None:
        return _own_loss
    if isinstance(loss, nn.Module):
        return _Criterion(loss)
    if callable(loss):
        return loss  # type: ignore[no-any-return]
    raise CompareError(f"loss: {loss!r} is neither a function, a module nor None")


def called(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping by name, a tuple or list by position, else alone."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _own_loss(model: nn.Module, batch: Any) -> Any:
    outputs = called(model, batch)
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", outputs)


class _Criterion:
    def __init__(self, criterion: nn.Module) -> None:
        self._criterion = criterion

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        try:
            inputs, target = batch
        except (TypeError, ValueError) as error:
            raise CompareError(
                f"batch: {type(batch).__name__} is no pair of inputs and target, which the "
                f"criterion {type(self._criterion).__name__} needs"
            ) from error
        return self._criterion(called(model, inputs), target)


def scalar(loss: Any) -> Tensor:
    """Return a loss as a 0-dim tensor; raises CompareError unless it is one real number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise CompareError(f"loss: is {found} and not one floating-point number")
    return loss.reshape(())


@contextmanager
def fp32_products() -> Iterator[None]:
    """Let the reference's products be exact FP32 on devices that would use TF32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def plain_thread(device: torch.device) -> Iterator[None]:
    """Settle what a new thread has of its own: the device, and where the backward pass runs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with (
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        # Autocast's cache belongs to all threads, and is emptied by the end of an outermost one.
        torch.autocast(device.type, enabled=False),
    ):
        yield


def in_plain_thread(device: torch.device, body: Callable[[], None]) -> None:
    """Run a body on a thread of its own, with the caller's random numbers; raise what it raises.

    The caller's grad mode, autocast and modes do not reach it; its random numbers are restored.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with plain_thread(device):
                body()
        except BaseException as error:
            errors.append(error)

    before = Randomness.now()
    thread = Thread(target=run, name="compare-trial", daemon=True)
    try:
        thread.start()
        thread.join()
    finally:
        before.restore()
    if errors:
        raise errors[0]
