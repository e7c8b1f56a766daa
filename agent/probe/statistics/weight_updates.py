"""What an optimizer's step did to the weights of one layer, and what its state says of the next.

Stock operations in pieces of bounded size: a few numbers of temporary memory per element of a
piece, no wait for a device. Runs on sampled steps only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import nan

import torch

from mp_agent.probe.statistics.table import bounded_tensor
from mp_agent.records.columns import OPTIMIZER

_PIECE_ELEMENTS_HOST = 2**15
_PIECE_ELEMENTS_DEVICE = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One layer's tensors, of one shape and device: those that exist.

    weight: after the step. before: a copy made before it. momentum: moving average of the gradient.
    second_moment: moving average of its square; divisor: what takes its place in the update.
    """

    weight: torch.Tensor
    before: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    momentum: torch.Tensor | None = None
    second_moment: torch.Tensor | None = None
    divisor: torch.Tensor | None = None

    def pieces(self) -> Iterator["LayerTensors"]:
        """Yield the tensors in pieces of equal bounds, one-dimensional."""
        on_host = self.weight.device.type == "cpu"
        limit = _PIECE_ELEMENTS_HOST if on_host else _PIECE_ELEMENTS_DEVICE
        flat = {
            name: torch.split(_flat(tensor), limit)
            for field in fields(self)
            if (tensor := getattr(self, name := field.name)) is not None
        }
        for parts in zip(*flat.values(), strict=True):
            yield LayerTensors(**dict(zip(flat, parts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """The numbers with which an optimizer stepped a layer.

    correction: what the second moment is divided by to correct its bias. epsilon: None where the
    update has none.
    """

    learning_rate: float | torch.Tensor | None = None
    correction: float | torch.Tensor = 1.0
    epsilon: float | None = None


def update_row(tensors: LayerTensors, rule: UpdateRule) -> torch.Tensor:
    """Return the columns [C] of `OPTIMIZER` for one layer, as float64 on its device.

    Sums and counts are over float64 of the elements; NaN where a column was not observed.
    """
    total: dict[str, torch.Tensor] = {}
    for piece in tensors.pieces():
        for name, value in _sums(piece, rule).items():
            total[name] = total[name] + value if name in total else value
    rate = None if rule.learning_rate is None else _filled(tensors.weight, rule.learning_rate)
    if rate is not None:
        total["learning_rate"] = total["learning_rate_min"] = rate
    absent = _filled(tensors.weight, nan)
    return bounded_tensor(torch.stack([total.get(name, absent) for name in OPTIMIZER.names]))


def _sums(piece: LayerTensors, rule: UpdateRule) -> dict[str, torch.Tensor]:
    """Return what one piece adds to the columns."""
    weight_N = piece.weight.double()
    finite_N = weight_N.isfinite()
    sums = {
        "elements": _filled(piece.weight, float(weight_N.numel())),
        "weight_sum_squares": weight_N.where(finite_N, 0.0).square().sum(),
        "nonfinite_weights": _count(~finite_N),
    }
    if piece.before is not None:
        sums |= _compared(piece, piece.before, weight_N, finite_N, rule)
    if piece.second_moment is not None:
        sums |= _moments(piece, piece.second_moment, rule)
    return sums


def _compared(
    piece: LayerTensors,
    before: torch.Tensor,
    weight_N: torch.Tensor,
    finite_N: torch.Tensor,
    rule: UpdateRule,
) -> dict[str, torch.Tensor]:
    before_N = before.double()
    both_N = finite_N & before_N.isfinite()
    sums = {
        "compared_elements": _count(both_N),
        "compared_sum_squares": before_N.where(both_N, 0.0).square().sum(),
        "update_sum_squares": (weight_N - before_N).where(both_N, 0.0).square().sum(),
    }
    due = _nonzero(piece.gradient, piece.momentum)
    if piece.weight.element_size() > 2 or due is None:
        return sums
    due_N = due & both_N
    if rule.learning_rate is not None:
        due_N = due_N & (_filled(piece.weight, rule.learning_rate) != 0.0)
    sums["rounded_elements"] = _count(due_N)
    sums["lost_updates"] = _count(due_N & (weight_N == before_N))
    return sums


def _moments(
    piece: LayerTensors, second_moment: torch.Tensor, rule: UpdateRule
) -> dict[str, torch.Tensor]:
    moment_N = second_moment.double()
    sums = {"moment_elements": _filled(piece.weight, float(moment_N.numel()))}
    if rule.epsilon is None:
        return sums
    active_N = moment_N.isfinite() & (moment_N >= 0.0)
    moving_N = moment_N > 0.0
    for other in (piece.gradient, piece.momentum):
        if other is not None:
            active_N = active_N & other.isfinite()
            moving_N = moving_N | (other != 0)
    active_N = active_N & moving_N
    divisor_N = moment_N if piece.divisor is None else piece.divisor.double()
    root_N = (divisor_N / rule.correction).sqrt()
    lost = 0.0 < rule.epsilon < _smallest(second_moment.dtype)
    sums["active_elements"] = _count(active_N)
    sums["below_epsilon_elements"] = _count(active_N & (root_N < rule.epsilon))
    sums["lost_epsilon_elements"] = sums["moment_elements"] * float(lost)
    if piece.gradient is not None:
        least = max(rule.epsilon**2, torch.finfo(torch.float64).tiny)
        ratio_N = piece.gradient.double().square() / (moment_N / rule.correction).clamp(min=least)
        sums["squared_ratio_sum"] = bounded_tensor(ratio_N.where(active_N, 0.0)).sum()
    return sums


def _nonzero(*tensors: torch.Tensor | None) -> torch.Tensor | None:
    """Return where any of the tensors that exist is not zero; None if there is none."""
    found: torch.Tensor | None = None
    for tensor in tensors:
        if tensor is not None:
            found = tensor != 0 if found is None else found | (tensor != 0)
    return found


def _smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a format, subnormal ones included."""
    info = torch.finfo(dtype)
    return float(info.tiny) * float(info.eps)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of a tensor as one dimension, in the order of its elements."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def _count(mask_N: torch.Tensor) -> torch.Tensor:
    return mask_N.sum(dtype=torch.float64)


def _filled(like: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
    """Return a number as a 0-dim float64 on a tensor's device."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device, torch.float64, non_blocking=True).reshape(())
    return torch.full((), value, dtype=torch.float64, device=like.device)
