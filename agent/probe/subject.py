"""One optimizer that is watched, and what there is to measure of it."""

import weakref
from collections.abc import Callable

from torch.optim import Optimizer

from mp_agent.probe.plan import Plan

MakePlan = Callable[[Optimizer, str], Plan]


class Subject:
    """An optimizer until it is gone; keeps neither it nor, after it, the parameters alive.

    label: empty for the optimizer whose steps are the run's, "1", "2", … for others as they came.
    scaled: whether a GradScaler stepped it last; it may be one of several that do without.
    """

    def __init__(self, label: str, optimizer: Optimizer, make_plan: MakePlan) -> None:
        self.label = label
        self.scaled = True
        self._make_plan = make_plan
        self._plan: Plan | None = None
        self._optimizer = weakref.ref(optimizer, self._forget)

    @property
    def alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._optimizer() is not None

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether this is `optimizer`."""
        return self._optimizer() is optimizer

    def follow(self, optimizer: Optimizer) -> None:
        """Watch another optimizer from now on, which has taken the parameters over."""
        self._optimizer = weakref.ref(optimizer, self._forget)
        self._plan = None

    def become_first(self) -> None:
        """Let this optimizer's steps be the run's from now on."""
        self.label, self._plan = "", None

    def learning_rate(self) -> object:
        """Return that of the first parameter group, as it is kept there."""
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.param_groups[0].get("lr")

    def plan(self) -> Plan | None:
        """Return what to measure, made anew when needed; None once the optimizer is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        if self._plan is None or not self._plan.fits(optimizer):
            self._plan = self._make_plan(optimizer, self.label)
        return self._plan

    def _forget(self, gone: "weakref.ref[Optimizer]") -> None:
        if gone is self._optimizer:
            self._plan = None
