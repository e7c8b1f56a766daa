"""Tensors within values, and the errors between those of two runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import frexp, inf, ldexp, sqrt
from typing import Any

import torch
from torch import Tensor

from mp_agent.plan.comparison.model import TensorError
from mp_agent.plan.precision_plan import NumberFormat

_PLAIN = (str, bytes, int, float, complex, bool, type(None), Enum, torch.dtype, torch.device, type)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a value with its path.

    In tuples, lists, mappings, dataclasses, and what maps its tensors itself, such as the graphs of
    torch_geometric.
    """
    if isinstance(value, Tensor):
        yield path, value
    else:
        for name, item in _parts(value) or ():
            yield from tensors_of(item, f"{path}.{name}")


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a container with their keys; None for what is none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    return list(value.to_dict().items()) if _maps_itself(value) else None


def _maps_itself(value: Any) -> bool:
    methods = ("apply", "to", "to_dict")
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in methods)


def floating(value: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of a value by path."""
    return {path: one for path, one in tensors_of(value) if one.is_floating_point()}


def inexact(value: Any) -> dict[str, Tensor]:
    """Return the floating-point and the complex tensors of a value by path."""
    return {
        path: one for path, one in tensors_of(value) if one.is_floating_point() or one.is_complex()
    }


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with each tensor changed; containers are new, everything else the same."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, Mapping):
        made = copy(value)
        if hasattr(made, "__setitem__"):
            for key, item in value.items():
                made[key] = mapped(item, change)
        return made
    if is_dataclass(value) and not isinstance(value, type):
        return _mapped_fields(value, change)
    return copy(value).apply(change) if _maps_itself(value) else value


def as_real(tensor: Tensor) -> Tensor:
    """Return a tensor as dense real numbers: of complex ones both parts, in its own memory."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _mapped_fields(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    made = copy(value)
    for field in fields(value):
        if hasattr(value, field.name):
            # Not by its own setter: a frozen one has none.
            object.__setattr__(made, field.name, mapped(getattr(value, field.name), change))
    return made


def opaque_type(value: Any) -> str:
    """Return the name of a type within a value that may change while it is used; "" for none."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return ""
    parts = _parts(value)
    if parts is None:
        return "" if callable(value) else type(value).__name__
    return next((name for _, part in parts if (name := opaque_type(part))), "")


_PIECE_ELEMENTS = 1 << 18
_SCALE_EXPONENT_MIN = -1000
"""A factor of 2^1000 still is a float64."""

Pair = tuple[Tensor, Tensor]


def error_between(
    pairs: Iterable[Pair], number_format: NumberFormat, candidate_scale: float = 1.0
) -> TensorError:
    """Return the error of candidates against their references, as if all were one tensor.

    pairs: (reference, candidate) of equal shapes, of any floating-point dtypes.
    candidate_scale: what the candidates are divided by first, such as a loss scale.
    Shares of zero and of non-finite elements are those before the division.
    """
    pairs = [(one.detach(), other.detach()) for one, other in pairs]
    scale = _scale(pairs, candidate_scale)
    sums = _Sums(number_format, scale)
    for reference, candidate in _pieces(pairs):
        sums.add(reference, candidate, candidate_scale)
    return sums.result()


def relative_error(pairs: Sequence[Pair]) -> tuple[float, bool]:
    """Return the relative L2 error, and whether the candidate alone is not finite.

    The cheap form of `error_between`, for tensors that were measured where they were made.
    """
    difference = squares = 0.0
    lost = False
    scale = _scale(pairs, 1.0)
    for reference, candidate in _pieces([(a.detach(), b.detach()) for a, b in pairs]):
        a, b = reference.double() * scale, candidate.double() * scale
        finite = a.isfinite()
        both = finite & b.isfinite()
        lost = lost or bool((finite & ~both).any())
        a, b = a.where(both, 0.0), b.where(both, 0.0)
        difference += float((b - a).square().sum())
        squares += float(a.square().sum())
    return _ratio(difference, squares), lost


def _pieces(pairs: Sequence[Pair]) -> Iterator[Pair]:
    for reference, candidate in pairs:
        one = as_real(reference).reshape(-1)
        other = as_real(candidate).reshape(-1).to(reference.device)
        for begin in range(0, one.numel(), _PIECE_ELEMENTS):
            end = begin + _PIECE_ELEMENTS
            yield one[begin:end], other[begin:end]


def _scale(pairs: Sequence[Pair], candidate_scale: float) -> float:
    """Return a power of two that brings the largest magnitude near 1: squares stay in range."""
    largest = 0.0
    for reference, candidate in _pieces(pairs):
        for piece, divisor in ((reference, 1.0), (candidate, candidate_scale)):
            values = piece.double().abs()
            values = values.where(values.isfinite(), 0.0)
            largest = max(largest, float(values.max()) / divisor)
    return ldexp(1.0, -max(frexp(largest)[1], _SCALE_EXPONENT_MIN))


def _ratio(difference_squares: float, squares: float) -> float:
    if squares == 0.0:
        return 0.0 if difference_squares == 0.0 else inf
    return sqrt(difference_squares / squares)


def ulps(reference: Tensor, number_format: NumberFormat) -> Tensor:
    """Return the unit in the last place of a format at each float64 of `reference` [N].

    2^(max(⌊log₂|x|⌋, e_min) − p + 1), as in IEEE 754; that of the subnormals at zero.
    """
    exponents = torch.frexp(reference).exponent - 1
    exponents = exponents.where(reference != 0, number_format.exponent_min)
    exponents = exponents.clamp(min=number_format.exponent_min)
    power = (exponents - (number_format.significand_bits - 1)).double()
    # In two factors: 2^-1074 is the smallest float64, and pow() of it may flush to zero.
    half = torch.floor(power / 2)
    return torch.exp2(half) * torch.exp2(power - half)


@dataclass(slots=True)
class _Sums:
    number_format: NumberFormat
    scale: float
    elements: int = 0
    finite: int = 0
    difference_squares: float = 0.0
    reference_squares: float = 0.0
    candidate_squares: float = 0.0
    products: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    ulps_sum: float = 0.0
    ulps_max: float = 0.0
    overflows: int = 0
    nans: int = 0
    underflows: int = 0
    subnormals: int = 0
    reference_nonfinite: int = 0

    def add(self, reference: Tensor, candidate: Tensor, candidate_scale: float) -> None:
        a, raw = reference.double(), candidate.double()
        b = raw / candidate_scale
        finite = a.isfinite()
        both = finite & b.isfinite()
        self.elements += a.numel()
        self.finite += int(both.sum())
        self.reference_nonfinite += int((~finite).sum())
        self.overflows += int((finite & b.isinf()).sum())
        self.nans += int((finite & b.isnan()).sum())
        self.underflows += int((finite & (a != 0) & (raw == 0)).sum())
        tiny = (raw != 0) & (raw.abs() < self.number_format.smallest_normal)
        self.subnormals += int((finite & tiny).sum())
        steps = ulps(a.where(both, 0.0), self.number_format)
        a, b = a.where(both, 0.0), b.where(both, 0.0)
        unscaled = (b - a).abs()
        a, b = a * self.scale, b * self.scale
        difference = (b - a).abs()
        self.difference_squares += float(difference.square().sum())
        self.reference_squares += float(a.square().sum())
        self.candidate_squares += float(b.square().sum())
        self.products += float((a * b).sum())
        self.absolute += float(difference.sum())
        self.largest = max(self.largest, float(difference.max()))
        # Scaling loses small differences next to huge values; without it, huge ones overflow.
        counted = unscaled.where(unscaled.isfinite(), difference / self.scale) / steps
        self.ulps_sum += float(counted.sum())
        self.ulps_max = max(self.ulps_max, float(counted.max()))

    def result(self) -> TensorError:
        total, finite = max(self.elements, 1), max(self.finite, 1)
        return TensorError(
            elements=self.elements,
            relative_l2=_ratio(self.difference_squares, self.reference_squares),
            mean_abs=self.absolute / finite / self.scale,
            reference_rms=sqrt(self.reference_squares / finite) / self.scale,
            max_abs=self.largest / self.scale,
            ulps_mean=self.ulps_sum / finite,
            ulps_max=self.ulps_max,
            cosine=self._cosine(),
            overflow_ratio=self.overflows / total,
            nan_ratio=self.nans / total,
            underflow_ratio=self.underflows / total,
            subnormal_ratio=self.subnormals / total,
            reference_nonfinite_ratio=self.reference_nonfinite / total,
        )

    def _cosine(self) -> float:
        """Return 1 where both are zero, 0 where one is."""
        if self.reference_squares == 0.0 or self.candidate_squares == 0.0:
            return 1.0 if self.reference_squares == self.candidate_squares else 0.0
        norms = sqrt(self.reference_squares) * sqrt(self.candidate_squares)
        return max(-1.0, min(1.0, self.products / norms))
