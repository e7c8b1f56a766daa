"""What a row of a watched tensor has to be, in NumPy, one element at a time."""

from math import inf, isfinite, nan
from sys import float_info

import numpy as np
import numpy.typing as npt
import torch

from mp_agent.records.columns import TENSOR_EXPONENTS, exponent_column

Array = npt.NDArray[np.float64]


def values_of(tensor: torch.Tensor) -> Array:
    """The elements as float64; of complex ones real and imaginary parts along a last dimension."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
        tensor = tensor.float()  # which NumPy lacks, and float32 contains
    return np.asarray(tensor.numpy(), dtype=np.float64)


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a format, ties to even."""
    with np.errstate(over="ignore"):
        if dtype is torch.float16:
            return float(np.float16(value))
        if dtype is torch.float32:
            return float(np.float32(value))
        if dtype is torch.float64:
            return value
    assert dtype is torch.bfloat16
    (bits,) = np.array([value], dtype=np.float32).view(np.uint32)
    kept = (int(bits) + 0x7FFF + (int(bits) >> 16 & 1)) & 0xFFFF0000
    return float(np.array([kept], dtype=np.uint32).view(np.float32)[0])


def lost(terms: Array, dtype: torch.dtype) -> float:
    """The magnitudes that leave a sum rounded to the format as it is."""
    found, before = 0.0, 0.0
    for term in terms.tolist():
        kept = rounded(before, dtype)
        if not isfinite(kept) or rounded(kept + term, dtype) == kept:
            found += abs(term)
        before += term
    return found


def ranges(values: Array, dim: int) -> Array:
    """The range of each slice; NaN for slices without finite elements."""
    found = []
    for each in np.moveaxis(values, dim, 0):
        finite = each[np.isfinite(each)]
        found.append(finite.max() - finite.min() if finite.size else nan)
    return np.array(found)


def row(tensor: torch.Tensor, *, reduction: bool = False) -> dict[str, float]:
    """All columns but the ratio of ranges; `tensor` lies in memory in the order of its elements."""
    values = values_of(tensor)
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)]
    sizes = np.abs(finite)
    parts = [values[..., 0], values[..., 1]] if tensor.is_complex() else [values]
    dtype = tensor.real.dtype if tensor.is_complex() else tensor.dtype
    terms = [np.where(np.isfinite(part), part, 0.0).reshape(-1) for part in parts]
    exact = not dtype.is_floating_point
    with np.errstate(over="ignore"):
        squares, mass = float(np.square(finite).sum()), float(sizes.sum())
    return {
        "elements": float(flat.size),
        "nonfinite_elements": float(flat.size - finite.size),
        "sum": float(finite.sum()),
        "sum_squares": min(squares, float_info.max),
        "abs_sum": min(mass, float_info.max),
        "abs_max": float(sizes.max()) if finite.size else nan,
        "abs_min": float(sizes[sizes > 0].min()) if (sizes > 0).any() else nan,
        "swallowed_sum": nan if exact else sum(lost(part, dtype) for part in terms),
        "reduction": float(reduction),
        **bins(sizes[sizes > 0]),
    }


def bins(sizes: Array) -> dict[str, float]:
    """The number of magnitudes in each binade, those beyond the ends in the first and the last."""
    edges = [2.0**exponent for exponent in TENSOR_EXPONENTS]
    counts = {}
    for place, exponent in enumerate(TENSOR_EXPONENTS):
        low = edges[place] if place else 0.0
        high = edges[place + 1] if place + 1 < len(edges) else inf
        counts[exponent_column(exponent)] = float(((sizes >= low) & (sizes < high)).sum())
    return counts
