"""The calls of a model's modules on one side, each stopped at its begin and its end."""

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Thread, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from mp_agent.errors import CompareError
from mp_agent.plan.execution.errors import mapped, tensors_of
from mp_agent.plan.execution.lockstep import REFERENCE, Lockstep, Randomness, SideEvent
from mp_agent.plan.execution.precision import LOSS, Precision

Substitute = Callable[[str], Any]
"""Returns what the next call of a module is to return, by its name."""


@dataclass(slots=True)
class Finished:
    """A call within another one: what it returned, and the random numbers after it."""

    module: str
    outputs: Any
    versions: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the candidate's outputs."""
    randomness: Randomness


@dataclass(slots=True, eq=False)
class Frame:
    """A call under way on one side."""

    module: str
    index: int
    """Among the calls of this module within the call around it."""
    args: Any
    kwargs: Any
    randomness: Randomness
    versions: tuple[int, ...]
    children: list[Finished] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    measured: Any = None
    """What the observer knows of it; None where the other side had no such call."""
    parent: "Frame | None" = None

    @property
    def end(self) -> Hashable:
        """The key of its end."""
        return ("end", self.module, self.index)


class Calls:
    """Wraps the forward of every module in a copy of the model."""

    def __init__(
        self, side: int, model: nn.Module, precision: Precision, lockstep: Lockstep | None
    ) -> None:
        self.model = model
        self.precision = precision
        self.modules = dict(model.named_modules())
        self._side = side
        self._lockstep = lockstep
        self._stack: list[Frame] = []
        self._thread = 0
        self._substitute: Substitute | None = None
        self._depth = 0
        self._forwards: dict[str, Callable[..., Any]] = {}
        for name, module in self.modules.items():
            self._forwards[name] = module.forward
            module.forward = self._wrapped(name, module, module.forward)

    def close(self) -> None:
        """Unwrap all modules, so that nothing refers to the copy in a circle."""
        for module in self.modules.values():
            module.__dict__.pop("forward", None)
        self._forwards.clear()
        self.modules = {}
        self._stack = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Stop at the calls of this thread; not at what the backward pass computes again."""
        self._thread = get_ident()
        try:
            yield
        finally:
            self._thread = 0

    def call_loss(self, loss: Callable[..., Any], *args: Any) -> Any:
        """Call the loss function as if it were a module around the model."""
        self._forwards[LOSS] = loss
        return self._called(LOSS, None, loss, args, {})

    def replay(self, name: str, args: Any, kwargs: Any, substitute: Substitute) -> Any:
        """Call a module's forward on the present thread; modules within it return substitutes."""
        self._substitute = substitute
        try:
            module = self.modules.get(name)
            if name == LOSS:
                args = (self.model, *args[1:])
            return self.precision.call(name, module, self._forwards[name], args, kwargs)
        finally:
            self._substitute = None

    def _wrapped(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Any:
        @wraps(forward)
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._called(name, module, forward, args, kwargs)

        return traced

    def _called(
        self,
        name: str,
        module: nn.Module | None,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        if self._substitute is not None:
            return self._substitute(name)
        if get_ident() != self._thread or self._lockstep is None:
            return self.precision.call(name, module, forward, args, kwargs)
        frame = self._begin(self._lockstep, name, args, kwargs)
        outputs = self.precision.call(name, module, forward, args, kwargs)
        self._stack.pop()
        self._lockstep.post(self._side, SideEvent(frame.end, (frame, outputs), self._within(frame)))
        return outputs

    def _begin(self, lockstep: Lockstep, name: str, args: Any, kwargs: Any) -> Frame:
        parent = self._stack[-1] if self._stack else None
        counts = parent.counts if parent else Counter()
        index = counts[name]
        counts[name] += 1
        if self._side == REFERENCE and getattr(self.modules.get(name), "inplace", False) is True:
            # What it is about to overwrite is needed once it has run.
            args, kwargs = mapped(args, Tensor.clone), mapped(kwargs, Tensor.clone)
        frame = Frame(
            name, index, args, kwargs, Randomness.now(), versions_of((args, kwargs)), parent=parent
        )
        within = self._within(parent)
        lockstep.post(self._side, SideEvent(("begin", name, index), frame, within))
        self._stack.append(frame)
        return frame

    def _within(self, frame: Frame | None) -> tuple[Hashable, ...]:
        """Return the keys of the ends of a call and of those around it, outermost first."""
        keys = []
        while frame is not None:
            keys.append(frame.end)
            frame = frame.parent
        return tuple(reversed(keys))


def versions_of(value: Any) -> tuple[int, ...]:
    """Return how often each tensor in a value has been changed in place."""
    return tuple(one._version for _, one in tensors_of(value))


def dtypes_of(value: Any) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor in a value."""
    return tuple(one.dtype for _, one in tensors_of(value))


Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A training step up to the gradients."""

    model: nn.Module
    """The model as the user gave it, without wrappers. Never run."""
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
        _check_arguments(loss)
        return loss  # type: ignore[no-any-return]
    raise CompareError(f"loss: {loss!r} is neither a function, a module nor None")


def _check_arguments(loss: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return  # one of C's may have none
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise CompareError(f"loss: is called with the model and a batch: {error}") from error


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
        found = type(loss).__name__
        if isinstance(loss, Tensor):
            found = f"{loss.dtype} of shape {tuple(loss.shape)}"
        raise CompareError(f"loss: is {found} and not one floating-point number")
    return loss.reshape(())


@contextmanager
def fp32_products(*, tf32: bool = False) -> Iterator[None]:
    """Let FP32 products be exact on devices that would use TF32; tf32: let them use it."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
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
    """Run a body on its own thread, with the caller's random numbers; raise what it raises.

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
