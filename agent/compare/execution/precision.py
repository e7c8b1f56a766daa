"""What makes a run the reference or a candidate: casts, autocast, rounding, and what is kept."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mp_agent.compare.execution.rounding import RoundedOperands, mark_kept
from mp_agent.compare.formats import BF16, FP16, FP32, FP64, Candidate, NumberFormat
from mp_agent.compare.measure.trees import floating, mapped

LOSS = "(loss)"
"""Name of the loss function's own operations, among the names of modules."""

DTYPES: Mapping[NumberFormat, torch.dtype] = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    FP32: torch.float32,
    FP64: torch.float64,
}
Call = Callable[..., Any]


class Precision(Protocol):
    """How one side computes."""

    def dtype_of(self, module: str) -> torch.dtype:
        """Return the dtype of a module's parameters and buffers."""

    def cast(self, value: Any) -> Any:
        """Return a value with every tensor new, in the dtype of this side's inputs."""

    def running(self, *, replay: bool = False) -> AbstractContextManager[None]:
        """Return a context for a forward pass; replay: on the other side's thread."""

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward pass."""

    def call(
        self, name: str, module: nn.Module | None, forward: Call, args: Any, kwargs: Any
    ) -> Any:
        """Call a module's forward in the precision that it has."""


class ReferencePrecision:
    """Everything in one dtype."""

    def __init__(self, number_format: NumberFormat) -> None:
        self._dtype = DTYPES[number_format]

    def dtype_of(self, module: str) -> torch.dtype:
        """Return the one dtype."""
        return self._dtype

    def cast(self, value: Any) -> Any:
        """Return a value with every tensor new."""
        return cast(value, self._dtype)

    @contextmanager
    def running(self, *, replay: bool = False) -> Iterator[None]:
        """Change nothing."""
        yield

    def backward(self) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()

    def call(
        self, name: str, module: nn.Module | None, forward: Call, args: Any, kwargs: Any
    ) -> Any:
        """Call it."""
        return forward(*args, **kwargs)


class CandidatePrecision:
    """A candidate, with some modules, and all within them, kept in FP32."""

    def __init__(
        self, candidate: Candidate, device: torch.device, kept: Set[str] = frozenset()
    ) -> None:
        self.candidate = candidate
        self.kept = kept
        self._device = device
        self._low = DTYPES[candidate.format] if candidate.casts_model else torch.float32
        self._keeping = 0
        self._entered = False
        self.operand_underflow_ratio: float | None = None
        """Of the last pass that rounded operands: how many became zero."""
        self._rounding: list[RoundedOperands] = []

    def dtype_of(self, module: str) -> torch.dtype:
        """Return FP32 for what is kept, and for candidates that do not cast the model."""
        return torch.float32 if self.is_kept(module) else self._low

    def is_kept(self, name: str) -> bool:
        """Return whether a module, or one around it, is kept in FP32."""
        parts = name.split(".")
        return any(".".join(parts[:end]) in self.kept for end in range(1, len(parts) + 1)) or (
            "" in self.kept and name != LOSS
        )

    def cast(self, value: Any) -> Any:
        """Return a value with every tensor new, in the dtype that this candidate is fed.

        FP32 where something is kept, which may be the first to read it; the others cast it.
        """
        return cast(value, torch.float32 if self.kept else self._low)

    @contextmanager
    def running(self, *, replay: bool = False) -> Iterator[None]:
        """Enter autocast, or round operands."""
        with ExitStack() as stack:
            for name, value in (("_keeping", 0), ("_entered", True)):
                stack.callback(setattr, self, name, getattr(self, name))
                setattr(self, name, value)
            if self.candidate.autocast is not None:
                # A replay has no gradients; what it caches would have none either.
                dtype = DTYPES[self.candidate.autocast]
                kind = self._device.type
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=not replay))
            stack.enter_context(self.backward())
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Round operands; autocast is not for the backward pass."""
        with ExitStack() as stack:
            if self.candidate.rounds_operands:
                self._rounding.append(RoundedOperands(self.candidate.format))
                stack.callback(self._end_rounding)
                stack.enter_context(self._rounding[-1])
            if self.candidate.casts_model and self.kept:
                stack.enter_context(_EqualOperands(self._low))
            yield

    def _end_rounding(self) -> None:
        self.operand_underflow_ratio = self._rounding.pop().underflow_ratio

    def call(
        self, name: str, module: nn.Module | None, forward: Call, args: Any, kwargs: Any
    ) -> Any:
        """Call it; what is kept reads its inputs in FP32, and nothing within rounds or casts.

        Where the loss is kept, only the model within it runs in the candidate's precision.
        """
        outermost = "" if LOSS in self.kept else LOSS
        with nullcontext() if self._entered or name != outermost else self.running():
            outputs = self._called(name, module, forward, args, kwargs)
        return to_dtype(outputs, torch.float32) if name == outermost == "" else outputs

    def _called(
        self, name: str, module: nn.Module | None, forward: Call, args: Any, kwargs: Any
    ) -> Any:
        if self._keeping or name == LOSS:
            return forward(*args, **kwargs)
        if not self.is_kept(name):
            return self._low_call(module, forward, args, kwargs)
        args, kwargs = to_dtype(args, torch.float32), to_dtype(kwargs, torch.float32)
        with self._keeping_fp32():
            outputs = forward(*args, **kwargs)
        if self.candidate.rounds_operands:
            inputs = [*floating(args).values(), *floating(kwargs).values()]
            mark_kept(list(floating(outputs).values()), inputs)
        return outputs

    def _low_call(self, module: nn.Module | None, forward: Call, args: Any, kwargs: Any) -> Any:
        if not (self.candidate.casts_model and self.kept) or module is None:
            return forward(*args, **kwargs)
        if not any(module.children()):
            args, kwargs = to_dtype(args, self._low), to_dtype(kwargs, self._low)
        with _parameters_in(module, self._low):
            return forward(*args, **kwargs)

    @contextmanager
    def _keeping_fp32(self) -> Iterator[None]:
        self._keeping += 1
        for mode in self._rounding[-1:]:
            mode.suspended = True
        try:
            with torch.autocast(self._device.type, enabled=False):
                yield
        finally:
            self._keeping -= 1
            for mode in self._rounding[-1:]:
                mode.suspended = self._keeping > 0


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with every tensor new: floating-point ones in a dtype, none in the graph."""
    return mapped(
        value,
        lambda one: one.detach().to(dtype if one.is_floating_point() else one.dtype, copy=True),
    )


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors in a dtype; gradients go through."""
    return mapped(value, lambda one: one.to(dtype) if one.is_floating_point() else one)


@contextmanager
def _parameters_in(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the parameters that a module shares with one that is kept; gradients go through."""
    wide = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and parameter.dtype is not dtype
    }
    try:
        for name, parameter in wide.items():
            module._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]
        yield
    finally:
        module._parameters.update(wide)


_PRODUCTS = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.baddbmm,
    torch.einsum,
    torch.nn.functional.linear,
    torch.nn.functional.scaled_dot_product_attention,
    torch.nn.functional.conv1d,
    torch.nn.functional.conv2d,
    torch.nn.functional.conv3d,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.mm,
}


class _EqualOperands(TorchFunctionMode):
    """Casts the operands of a product to a 16-bit dtype where a kept module left some in FP32."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self._low = low

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            found = {*floating(args).values(), *floating(kwargs).values()}
            if len({one.dtype for one in found}) > 1:
                args, kwargs = to_dtype(args, self._low), to_dtype(kwargs, self._low)
        return func(*args, **kwargs)
