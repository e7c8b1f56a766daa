"""Precisions of a side: casts, autocast, and operands rounded to formats torch lacks."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.plan.execution.errors import floating, mapped
from mp_agent.plan.precision_plan import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    FP64,
    TF32,
    Candidate,
    NumberFormat,
    is_within,
)

KEPT = "mp_agent_kept"
"""Marks nodes of the autograd graph whose products are not rounded."""

_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "addmv": (1, 2),
    "addbmm": (1, 2),
    "baddbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_overrideable": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3),
    "_scaled_dot_product_flash_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention_backward": (0, 1, 2, 3),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
    "_scaled_dot_product_efficient_attention_backward": (0, 1, 2, 3),
    "_scaled_dot_product_cudnn_attention": (0, 1, 2),
    "_scaled_dot_product_cudnn_attention_backward": (0, 1, 2, 3),
    "mkldnn_rnn_layer": (0, 1, 2, 5),
    "mkldnn_rnn_layer_backward": (0, 1, 2, 5),
}
"""Which arguments of an operator are multiplied with each other."""

_TORCH_DTYPES = {FP8_E4M3: torch.float8_e4m3fn, FP8_E5M2: torch.float8_e5m2}
_TF32_DROPPED_BITS = 13


class RoundedOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active on a thread, matrix products and convolutions read rounded operands.

    Forward and backward, since it acts below autograd, which keeps what was not rounded. Inactive
    while `suspended`, and in the backward of nodes that are marked with `KEPT`.
    """

    def __init__(self, number_format: NumberFormat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.suspended = False
        self._format = number_format
        self._elements = 0
        self._flushed: list[Tensor] = []

    @property
    def underflow_ratio(self) -> float:
        """Operands that became zero, of all that were rounded; 0 to 1."""
        return sum(float(one) for one in self._flushed) / max(self._elements, 1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the operator, with its operands rounded."""
        positions = _OPERANDS.get(func.overloadpacket.__name__)
        if positions and not self.suspended and not _in_kept_node():
            args = tuple(
                self._rounded(value) if index in positions else value
                for index, value in enumerate(args)
            )
        return func(*args, **(kwargs or {}))

    def _rounded(self, value: Any) -> Any:
        made = rounded(value, self._format)
        if made is not value and self._format is not TF32:
            self._elements += value.numel()
            self._flushed.append(((made == 0) & (value != 0)).sum())
        return made


def rounded(value: Any, number_format: NumberFormat) -> Any:
    """Return a floating-point tensor rounded to nearest, ties to even, in its own dtype.

    FP8: after scaling by a power of two that brings its largest magnitude into the upper half of
    the format's range, so that nothing overflows. Whatever is not finite stays as it is.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return value
    if number_format is TF32:
        return _rounded_tf32(value)
    scale = _fp8_scale(value, number_format)
    scaled = (value.float() * scale).clamp(-number_format.largest, number_format.largest)
    back = scaled.to(_TORCH_DTYPES[number_format]).float() / scale
    return back.where(value.isfinite(), value.float()).to(value.dtype)


def _fp8_scale(value: Tensor, number_format: NumberFormat) -> Tensor:
    magnitudes = value.float().abs()
    largest = magnitudes.where(magnitudes.isfinite(), 0.0).amax()
    exponent = torch.frexp(number_format.largest / largest).exponent - 1
    # Of zeros only, the quotient is Inf; a scale of subnormals would be out of FP32's range.
    exponent = exponent.where(largest > 0, 0).clamp(-100, 100)
    return torch.ldexp(torch.ones((), device=value.device), exponent)


def _rounded_tf32(value: Tensor) -> Tensor:
    if value.dtype is not torch.float32:
        # 16-bit formats have no more fraction bits than TF32.
        return value
    bits = value.contiguous().view(torch.int32)
    odd = (bits >> _TF32_DROPPED_BITS) & 1
    half = (1 << (_TF32_DROPPED_BITS - 1)) - 1
    made = ((bits + half + odd) & -(1 << _TF32_DROPPED_BITS)).view(torch.float32)
    return made.where(value.isfinite(), value)


def _in_kept_node() -> bool:
    node: Any = torch._C._current_autograd_node()
    return node is not None and KEPT in node.metadata


def mark_kept(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Mark the nodes of the graph that lead from inputs to outputs."""
    ends = {one.grad_fn for one in inputs}
    pending: list[Any] = [one.grad_fn for one in outputs]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        node.metadata[KEPT] = True
        pending.extend(following for following, _ in node.next_functions)


LOSS = "(loss)"
"""Name of the loss function's own operations, among the names of modules."""

DTYPES: Mapping[NumberFormat, torch.dtype] = {
    FP16: torch.float16,
    BF16: torch.bfloat16,
    FP32: torch.float32,
    FP64: torch.float64,
}
Call = Callable[..., Any]


class Precision:
    """How one side computes: as a candidate, with some modules, and all in them, kept in FP32."""

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
        """Share of operands that became zero in the last pass that rounded any."""
        self._rounding: list[RoundedOperands] = []

    def dtype_of(self, module: str) -> torch.dtype:
        """Return FP32 for what is kept, and for candidates that do not cast the model."""
        return torch.float32 if self.is_kept(module) else self._low

    def is_kept(self, name: str) -> bool:
        """Return whether a module, or one around it, is kept in FP32."""
        return is_within(name, self.kept) or ("" in self.kept and name != LOSS)

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
    return mapped(value, lambda one: one.detach().to(counterpart(one, dtype), copy=True))


def counterpart(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor where floating-point ones have `dtype`.

    Complex numbers of 16 bits are hardly implemented: those have FP32's or FP64's parts.
    """
    if tensor.is_complex():
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return dtype if tensor.is_floating_point() else tensor.dtype


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
