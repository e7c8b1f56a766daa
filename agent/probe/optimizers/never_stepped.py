"""Optimizers whose gradients are made and cleared over and over again, and that never step."""

import weakref
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from mp_agent.probe.optimizers.parameter_names import has_gradient, optimizer_parameters
from mp_agent.probe.optimizers.plan import local_of
from mp_agent.probe.scalars import Scalar, scalar_of

_OPTIMIZERS_AT_MOST = 8
_RECENT_STEPS = 16
"""Steps of the run for which an optimizer counts after its gradients were cleared."""
_ELEMENTS = 256
"""Number of elements of each inspected parameter."""


class NeverStepped:
    """Follows optimizers from the first time that their gradients are cleared to their first step.

    Where the weights of one change, something else steps them.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, _Waiting] = {}
        """By `id`; one that steps is taken out."""

    def clears(self, unstepped: Sequence[Optimizer]) -> None:
        """Note that the gradients of optimizers that have not stepped are about to be cleared."""
        for optimizer in unstepped:
            if not has_gradient(optimizer):
                continue
            known = self.waiting.get(id(optimizer))
            if known is not None and known.optimizer() is optimizer:
                known.steps = 0
            elif len(self.waiting) < _OPTIMIZERS_AT_MOST:
                self.waiting[id(optimizer)] = _Waiting(optimizer)

    def run_stepped(self) -> list[Scalar | None]:
        """Return of each that has not stepped although the run has whether its weights stay."""
        for key, each in list(self.waiting.items()):
            each.steps += 1
            if each.optimizer() is None or each.steps > _RECENT_STEPS:
                del self.waiting[key]
        return [each.keeps_weights() for each in self.waiting.values()]

    @property
    def weights_change(self) -> bool:
        """Whether weights of one are known on the host to change: the script updates them."""
        flags = [each.keeps_weights() for each in self.waiting.values()]
        return any(isinstance(flag, float) and flag == 0.0 for flag in flags)


class _Waiting:
    """An optimizer that has not stepped, and what a few of its weights were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.steps = 0
        """Steps of the run since its gradients were cleared last."""
        found = [each for each in optimizer_parameters(optimizer) if each.grad is not None]
        inspected = [found[at] for at in sorted({0, len(found) // 2, len(found) - 1})]
        self._before = [(weakref.ref(each), _elements(each).clone()) for each in inspected]

    def keeps_weights(self) -> Scalar | None:
        """Return whether the weights are as they were: 1 or 0, where they are; None if gone."""
        now = [
            (_elements(parameter), before)
            for ref, before in self._before
            if (parameter := ref()) is not None
        ]
        equal = [
            (own == before).all()
            for own, before in now
            if (own.device, own.shape) == (before.device, before.shape)
        ]
        return scalar_of(torch.stack(equal).all().double()) if equal else None


def _elements(parameter: torch.Tensor) -> torch.Tensor:
    own = local_of(parameter.detach())
    return (own if own.is_contiguous() else own[:1]).flatten()[:_ELEMENTS]
