"""What is watched: the optimizers of this process, and their gradients."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe import discovery
from mp_agent.probe.discovery import LiveObjects
from mp_agent.probe.plan import Plan, make_plan
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.subject import Subject

OPTIMIZERS_AT_MOST = 8


class Subjects:
    """The optimizers seen at a measuring point; the first of them sets the step count.

    Of optimizers that hold the same parameters (one that wraps another, ZeroRedundancyOptimizer's
    own part, a successor) only one counts. When the first is gone, the next one seen takes over.
    """

    def __init__(
        self, note_unsupported: Callable[[str], None], ranks_in_run: Callable[[], int]
    ) -> None:
        self.note_unsupported = note_unsupported
        self._ranks_in_run = ranks_in_run
        self._subjects: list[Subject] = []
        self._labels_given = 0
        self._model: weakref.ref[nn.Module] | None = None
        self._live: LiveObjects | None = None
        self._searched = False
        self.strangers = 0
        """Other optimizers of the newest plan's model, when it was made."""
        self._statistics: dict[torch.device, GradientStatistics] = {}

    def settle(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        """Take the model and the first optimizer that the user named."""
        self._model = None if model is None else weakref.ref(model)
        if optimizer is not None:
            self.of(optimizer)

    @property
    def first(self) -> Subject | None:
        """The one whose steps are the run's."""
        return next((subject for subject in self._subjects if not subject.label), None)

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self._subjects) > 1

    def of(self, optimizer: Optimizer) -> Subject | None:
        """Return the subject for which a step of `optimizer` counts; None when there is none."""
        for subject in self._subjects:
            if subject.is_of(optimizer):
                if subject.label and not any(s.alive and not s.label for s in self._subjects):
                    self._drop_gone()
                    subject.become_first()
                return subject
        return self._take(optimizer)

    def holding(self, parameters: Sequence[torch.Tensor]) -> list[Subject]:
        """Return those that hold any of `parameters`.

        Before the first step they may have to be found, once, among the live objects.
        """
        if not self._subjects and not self._searched and parameters:
            self._searched = True
            for optimizer in discovery.holders(self._look().optimizers, parameters):
                self.of(optimizer)
            if not self._subjects:
                self._live = None
        if not self.several:
            parameters = _first_with_gradient(parameters)
        identities = {id(parameter) for parameter in parameters}
        return [
            subject
            for subject in self._subjects
            if (plan := subject.plan()) is not None and not plan.identities.isdisjoint(identities)
        ]

    def plans(self) -> list[Plan]:
        """Return the plans of all, the first optimizer's first; those on another device are out."""
        if len(self._subjects) == 1:
            plan = self._subjects[0].plan()
            return [] if plan is None else [plan]
        found = [plan for subject in self._subjects if (plan := subject.plan()) is not None]
        found.sort(key=lambda plan: plan.label)
        usable = [plan for plan in found if plan.device == found[0].device]
        if len(usable) < len(found):
            self.note_unsupported("optimizers on several devices")
        return usable

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

    def weight_digest(self, plans: Sequence[Plan]) -> Scalar | None:
        """Return the digest of all local weights, left on their device."""
        weights = [weight for plan in plans for weight in plan.weights()]
        return scalar_of(self._statistics_on(plans[0].device).digest(weights))

    def _take(self, optimizer: Optimizer) -> Subject | None:
        """Take an optimizer in that was not seen before, unless its parameters are known."""
        self._drop_gone()
        held = {id(parameter) for parameter in discovery.optimizer_parameters(optimizer)}
        if not held:
            return None
        for subject in self._subjects:
            plan = subject.plan()
            if plan is not None and plan.identities <= held:
                if len(held) > len(plan.identities):
                    subject.follow(optimizer)
                return subject
        if len(self._subjects) == OPTIMIZERS_AT_MOST:
            self.note_unsupported(f"more than {OPTIMIZERS_AT_MOST} optimizers")
            return None
        self._subjects.append(Subject(self._next_label(), optimizer, self._plan_of))
        return self._subjects[-1]

    def _next_label(self) -> str:
        if self.first is None:
            return ""
        self._labels_given += 1
        return str(self._labels_given)

    def _drop_gone(self) -> None:
        self._subjects = [subject for subject in self._subjects if subject.alive]

    def _plan_of(self, optimizer: Optimizer, label: str) -> Plan:
        live = self._look()
        root = self._model() if self._model is not None and not label else None
        if root is None:
            parameters = discovery.optimizer_parameters(optimizer)
            root = discovery.root_module(live.modules, parameters)
        plan = make_plan(optimizer, live, root, self._ranks_in_run(), label)
        self.strangers = discovery.count_beside(live.optimizers, plan.identities, root)
        self._live = None
        return plan

    def _statistics_on(self, device: torch.device) -> GradientStatistics:
        if device not in self._statistics:
            self._statistics[device] = for_device(device)
        return self._statistics[device]

    def _look(self) -> LiveObjects:
        if self._live is None:
            self._live = discovery.walk()
        return self._live


def _first_with_gradient(parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the first of `parameters` that is trained: frozen ones may be no optimizer's."""
    for parameter in parameters:
        if parameter.grad is not None:
            return (parameter,)
    return parameters[:1]
