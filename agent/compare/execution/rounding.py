"""Operands of matrix products rounded to a format that torch computes nothing in."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.compare.formats import FP8_E4M3, FP8_E5M2, TF32, NumberFormat

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
