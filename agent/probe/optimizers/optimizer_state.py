"""Where the optimizers of torch keep what they step a layer with, and by which rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.probe.optimizers.layer_slots import LayerSlot, local_of
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of
from mp_agent.probe.statistics.weight_updates import LayerTensors, UpdateRule

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
        correction = _correction(found.get("step"), group.get("betas"))
        if not isinstance(epsilon, float | int) or not _lies_with(slot, correction):
            epsilon, correction = None, 1.0
        return UpdateRule(
            learning_rate=rate if _lies_with(slot, rate) else None,
            correction=correction,
            epsilon=epsilon,
        )

    def _of(self, slot: LayerSlot) -> Mapping[str, Any]:
        """Return a layer's state; none of Adadelta's, which adds epsilon within the root."""
        found = self.state.get(slot.parameter, {})
        return {} if "acc_delta" in found else found


def _correction(step: object, betas: object) -> Scalar:
    """Return 1 - β₂^step, by which Adam corrects the second moment's bias; 1 for the others."""
    steps = scalar_of(step)
    if steps is None or not isinstance(betas, tuple | list) or len(betas) < 2:
        return 1.0
    beta = scalar_of(betas[1])
    if beta is None:
        return 1.0
    correction = 1.0 - beta ** (steps.double() if isinstance(steps, torch.Tensor) else steps)
    return correction if isinstance(correction, torch.Tensor) or correction > 0.0 else 1.0


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
