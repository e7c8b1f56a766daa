"""What is watched: the one optimizer whose steps are the run's, and its gradients."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe import discovery, placement
from mp_agent.probe.discovery import LiveObjects
from mp_agent.probe.plan import Plan, make_plan
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.statistics import GradientStatistics, for_device


class Subject:
    """The first optimizer seen at a measuring point, until it is gone; then the next one.

    It keeps neither the optimizer nor, after it, the parameters alive.
    """

    def __init__(self, note_unsupported: Callable[[str], None]) -> None:
        self._note_unsupported = note_unsupported
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._plan: Plan | None = None
        self._live: LiveObjects | None = None
        self._searched = False
        self._statistics: dict[torch.device, GradientStatistics] = {}

    def settle(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        """Take the model and the optimizer that the user named."""
        self._model = None if model is None else weakref.ref(model)
        if optimizer is not None:
            self.claim(optimizer)

    def claim(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` is the one; the first that asks becomes it."""
        current = None if self._optimizer is None else self._optimizer()
        if current is None:
            self._optimizer = weakref.ref(optimizer, self._forget)
            self._plan = None
        elif current is not optimizer:
            self._note_unsupported("second optimizer")
            return False
        return True

    def is_current(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` is the one already."""
        return self._optimizer is not None and self._optimizer() is optimizer

    def claim_holder(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether the one holds the first of `parameters`.

        Before the first step it may have to be found, once, among the live objects.
        """
        if not parameters:
            return False
        if self._optimizer is None and not self._searched:
            self._searched = True
            found = discovery.find_optimizer(self._look_around().optimizers, parameters[0])
            return found is not None and self.claim(found)
        plan = self.plan()
        return plan is not None and plan.holds(parameters[0])

    def learning_rate(self) -> object:
        """Return that of the first parameter group, as it is kept there."""
        optimizer = None if self._optimizer is None else self._optimizer()
        return None if optimizer is None else optimizer.param_groups[0].get("lr")

    def plan(self) -> Plan | None:
        """Return what to measure, made anew when needed; None while there is no optimizer."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            return None
        if self._plan is None or not self._plan.fits(optimizer):
            live = self._look_around()
            root = self._model() if self._model is not None else None
            if root is None:
                parameters = discovery.optimizer_parameters(optimizer)
                root = discovery.root_module(live.modules, parameters)
            self._plan = make_plan(optimizer, live, root, placement.world_size())
            self._live = None
        return self._plan

    def layers(
        self, plan: Plan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [L, C] of each layer, on the gradients' device."""
        return self._statistics_on(plan.device).layers(gradients, inverse_scale)

    def totals(
        self, plan: Plan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [G, C] of each share, on the gradients' device."""
        return self._statistics_on(plan.device).totals(plan.by_share(gradients), inverse_scale)

    def _statistics_on(self, device: torch.device) -> GradientStatistics:
        if device not in self._statistics:
            self._statistics[device] = for_device(device)
        return self._statistics[device]

    def _look_around(self) -> LiveObjects:
        if self._live is None:
            self._live = discovery.walk()
        return self._live

    def _forget(self, gone: "weakref.ref[Optimizer]") -> None:
        if gone is self._optimizer:
            self._optimizer = None
            self._plan = None
