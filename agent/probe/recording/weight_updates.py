"""What an optimizer's step did to the weights, and what its state says of the next.

What an optimizer's step did to the weights of one layer, and what its state says of the next.
Stock operations in pieces of bounded size: a few numbers of temporary memory per element of a
piece, no wait for a device. Runs on sampled steps only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.instrument import Instrument
from mp_agent.probe.optimizers.plan import LayerSlot, MeasurementPlan, local_of
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of
from mp_agent.probe.statistics.pieces import bounded_tensor
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.measurement import Measurement
from mp_agent.probe.step.open_step import OpenStep, SampledRows
from mp_agent.records.columns import OPTIMIZER

_PIECE_ELEMENTS_HOST = 2**15
_PIECE_ELEMENTS_DEVICE = 2**22
_FOREIGN = 4.0
"""Factor by which neither rounding a moment nor a weight decay in the gradient makes it smaller."""
_RATIO = OPTIMIZER.names.index("squared_ratio_sum")


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

    correction: what the second moment is divided by to correct its bias. newest: share of the
    latest square in it, 1 - β₂; 0 where unknown. epsilon: None where the update has none.
    """

    learning_rate: float | torch.Tensor | None = None
    correction: float | torch.Tensor = 1.0
    newest: float = 0.0
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
        squares_N = piece.gradient.double().square()
        ratio_N = squares_N / (moment_N / rule.correction).clamp(min=least)
        ratio_sum = bounded_tensor(ratio_N.where(active_N, 0.0)).sum()
        room_N = _FOREIGN * moment_N + _smallest(second_moment.dtype)
        foreign = (active_N & (rule.newest * squares_N > room_N)).any()
        sums["squared_ratio_sum"] = ratio_sum.where(~foreign, -torch.inf)
    return sums


def _without_foreign(rows_LC: torch.Tensor) -> torch.Tensor:
    """Return the rows of an optimizer with ratios of -Inf if any of them is one of foreign numbers.

    A moving average holds its newest term. Where it does not hold the square of what is in `grad`,
    the optimizer has changed that within its step, or averages in another basis. -Inf, since it
    remains in any sum: what is absent on one rank alone would be taken for a small ratio.
    """
    ratios_L = rows_LC[:, _RATIO]
    rows_LC[:, _RATIO] = ratios_L.where(~(ratios_L < 0.0).any(), -torch.inf)
    return rows_LC


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


_MOMENTA = ("exp_avg", "momentum_buffer")


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """The state of an optimizer as it is now, and the group of each parameter, by `id`."""

    state: Mapping[torch.Tensor, Mapping[str, Any]]
    groups: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> "OptimizerState":
        """Return the state of an optimizer; reads what is there and makes nothing."""
        groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        return cls(optimizer.state, groups)

    def tensors(self, slot: LayerSlot, before: torch.Tensor | None) -> LayerTensors | None:
        """Return this rank's part of a layer and of its state; None for tensors of other kinds.

        State in another shape (factored) or in a format of its own (quantized) is left out.
        """
        weight = part_of(slot, slot.parameter)
        if weight is None or not (weight.is_floating_point() or weight.is_complex()):
            return None
        found = self._of(slot)
        moments = "square_avg" if "square_avg" in found else "exp_avg_sq"
        shape, device = weight.shape, weight.device

        def like(value: object) -> torch.Tensor | None:
            part = part_of(slot, value)
            if part is None or part.shape != shape or part.device != device:
                return None
            return part

        return LayerTensors(
            weight=weight,
            before=before,
            gradient=like(slot.parameter.grad),
            momentum=next(
                (part for name in _MOMENTA if (part := like(found.get(name))) is not None), None
            ),
            second_moment=like(found.get(moments)),
            divisor=like(found.get("max_exp_avg_sq")),
        )

    def rule(self, slot: LayerSlot) -> UpdateRule:
        """Return the numbers with which a layer was stepped."""
        group = self.groups.get(id(slot.parameter), {})
        found = self._of(slot)
        epsilon, rate = group.get("eps"), snapshot_of(group.get("lr"))
        correction = _correction(found.get("step", group.get("step")), group.get("betas"))
        known = correction is not None and _lies_with(slot, correction)
        if not known or not isinstance(epsilon, float | int):
            epsilon, correction = None, None
        return UpdateRule(
            learning_rate=rate if _lies_with(slot, rate) else None,
            correction=1.0 if correction is None else correction,
            newest=_newest(group.get("betas")),
            epsilon=epsilon,
        )

    def _of(self, slot: LayerSlot) -> Mapping[str, Any]:
        """Return a layer's state; none of Adadelta's, which adds epsilon within the root."""
        found = self.state.get(slot.parameter, {})
        return {} if "acc_delta" in found else found


def _correction(step: object, betas: object) -> Scalar | None:
    """Return 1 - β₂^step, by which Adam corrects the second moment's bias; 1 for the others.

    None where there is such a bias, and no known place says how many steps there were.
    """
    if not isinstance(betas, tuple | list) or len(betas) < 2:
        return 1.0
    beta = scalar_of(betas[1])
    if beta is None:
        return 1.0
    steps = scalar_of(step)
    if steps is None:
        return None
    correction = 1.0 - beta ** (steps.double() if isinstance(steps, torch.Tensor) else steps)
    return correction if isinstance(correction, torch.Tensor) or correction > 0.0 else 1.0


def _newest(betas: object) -> float:
    if not isinstance(betas, tuple | list) or len(betas) < 2:
        return 0.0
    beta = scalar_of(betas[1])
    return 1.0 - beta if isinstance(beta, float) else 0.0


def _lies_with(slot: LayerSlot, scalar: Scalar | None) -> bool:
    """Return whether using a number with a layer makes nothing wait for another device."""
    return not isinstance(scalar, torch.Tensor) or scalar.device == slot.parameter.device


def part_of(slot: LayerSlot, value: object) -> torch.Tensor | None:
    """Return this rank's part of a plain tensor that is the slot's; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    local = local_of(value.detach())
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        return None
    if slot.part is None:
        return local
    return local[slot.part] if local.dim() == 1 and slot.part.stop <= local.numel() else None


_MIB = 2**20


class WeightUpdates(Instrument):
    """Copies the weights before a sampled step, and compares with them after it.

    The copies are as large as the local weights, up to a limit, and live for one step.
    """

    subject = "updates of weights"

    def __init__(
        self,
        measures: Measurement,
        registry: OptimizerRegistry,
        schedule: LayerSchedule,
        copy_mib: float,
    ) -> None:
        """copy_mib: the limit."""
        self._measures = measures
        self._registry = registry
        self._schedule = schedule
        self._enabled = True
        """Whether updates are measured: not once memory has run out."""
        self._limit_bytes = copy_mib * _MIB
        self._note_unsupported = registry.note_unsupported
        self._kept: dict[str, tuple[int, list[torch.Tensor | None]]] = {}
        """The step, and the weights [L] before it, None for those left out; by optimizer."""

    def gradients_measured(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Copy the weights of optimizers that are about to step, unless that was done."""
        if not self._enabled or not self._schedule.due(step.sequence):
            return
        self._kept = {label: kept for label, kept in self._kept.items() if kept[0] == step.sequence}
        room = self._limit_bytes - sum(
            copy.nbytes for _, copies in self._kept.values() for copy in copies if copy is not None
        )
        try:
            for plan in plans:
                if plan.label not in self._kept:
                    copies, room = self._copies(plan, room)
                    self._kept[plan.label] = step.sequence, copies
        except torch.OutOfMemoryError:
            self._enabled, self._kept = False, {}
            self._note_unsupported("updates of weights, for whose copy there is no memory")

    def optimizer_stepped(self, step: OpenStep, watched: WatchedOptimizer) -> None:
        """Measure what an optimizer has done, if this is a sampled step that it did not skip."""
        if not self._enabled or not self._schedule.due(step.sequence):
            return
        optimizer, plan = watched.optimizer, watched.plan()
        if optimizer is None or plan is None:
            return
        if watched.managed:
            self._note_unsupported("updates of weights that an engine steps")
            return
        skipped = watched.scalars.get("skipped", 0.0)
        if not isinstance(skipped, torch.Tensor) and skipped:
            self._kept.pop(plan.label, None)
            return
        timer = accelerator.start_timer(plan.device)
        self._measure(step, plan, optimizer)
        if not plan.of_run:
            step.forget_if(skipped, plan.label)
        if timer is not None:
            timer.stop()
            step.timers.append(timer)

    def _measure(self, step: OpenStep, plan: MeasurementPlan, optimizer: Optimizer) -> None:
        """Add the rows of an optimizer, while its gradients are there."""
        sequence, copies = self._kept.pop(plan.label, (0, []))
        if sequence != step.sequence or len(copies) != len(plan.slots):
            return
        state = OptimizerState.of(optimizer)
        rows_LC = torch.stack(
            [_row(state, slot, copy) for slot, copy in zip(plan.slots, copies, strict=True)]
        )
        rows_LC = _without_foreign(rows_LC)
        sampled = step.sampled.setdefault(OPTIMIZER.name, SampledRows())
        sampled.rows[plan.label] = rows_LC
        sampled.totals[plan.label] = self._measures.totals_of_layers(plan, rows_LC, OPTIMIZER)

    def _copies(
        self, plan: MeasurementPlan, room: float
    ) -> tuple[list[torch.Tensor | None], float]:
        """Return copies of the weights of as many layers as there is room for, and the rest."""
        copies: list[torch.Tensor | None] = []
        for slot in plan.slots:
            weight = part_of(slot, slot.parameter)
            room -= 0 if weight is None else weight.nbytes
            copies.append(weight.clone() if weight is not None and room >= 0 else None)
        if room < 0:
            self._note_unsupported("updates of weights beyond update_copy_mib")
        return copies, room


def _row(state: OptimizerState, slot: LayerSlot, copy: torch.Tensor | None) -> torch.Tensor:
    """Return the columns [C] of one layer; none of them for tensors of other kinds."""
    if (tensors := state.tensors(slot, copy)) is None:
        device = slot.parameter.device
        return torch.full((len(OPTIMIZER.names),), torch.nan, dtype=torch.float64, device=device)
    return update_row(tensors, state.rule(slot))
