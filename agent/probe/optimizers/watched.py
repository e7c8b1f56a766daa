"""One watched optimizer: its role, and the plan of what to measure."""

import weakref
from collections.abc import Callable
from enum import Enum

from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.optimizers.lookup.optimizer_parameters import optimizer_parameters
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.scalars import Scalar

MakePlan = Callable[[Optimizer, "WatchedOptimizer"], MeasurementPlan]


class Role(Enum):
    """What an optimizer is to the run."""

    FIRST = "first"
    """Trains the run's model; the first of those that do."""

    JOINT = "joint"
    """Trains another part of the same model, by the same backward."""

    CANDIDATE = "candidate"
    """Expected to be joint before it has stepped; its gradients count as the run's already."""

    SEPARATE = "separate"
    """Trains another model, or by another backward."""


class WatchedOptimizer:
    """An optimizer until it is gone; keeps neither it nor, after it, the parameters alive.

    label: empty for the first, "1", "2", … for others as they came.
    scaled: whether a GradScaler stepped it last; it may be one of several that do without.
    managed: whether a framework's engine steps it.
    """

    def __init__(self, label: str, role: Role, optimizer: Optimizer, make_plan: MakePlan) -> None:
        self.label = label
        self.role = role
        self.scaled = True
        self.managed = False
        self.scalars: dict[str, Scalar] = {}
        """Values of its current step alone, by step column."""
        self.stepped_in_pass = 0
        """Number of the last backward before its last step."""
        self.idle_steps = 0
        """Steps of the run since it became a candidate."""
        self.thread: int | None = None
        """The one in which its gradients were measured last."""
        self._make_plan = make_plan
        self._plan: MeasurementPlan | None = None
        self._optimizer = weakref.ref(optimizer, self._forget)

    @property
    def alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._optimizer() is not None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, until it is gone."""
        return self._optimizer()

    @property
    def of_run(self) -> bool:
        """Whether its steps are steps of the run."""
        return self.role in (Role.FIRST, Role.JOINT)

    @property
    def joint(self) -> bool:
        """Whether its gradients are a part of the run's although it is not the first."""
        return self.role in (Role.JOINT, Role.CANDIDATE)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether this is `optimizer`."""
        return self._optimizer() is optimizer

    def is_cleared_by(self, owner: Optimizer | nn.Module) -> bool:
        """Return whether gradients of this optimizer are among those that `owner` clears."""
        if isinstance(owner, Optimizer):
            parameters = optimizer_parameters(owner)
        else:
            parameters = nn.Module.parameters(owner)
        trained = next((each for each in parameters if each.requires_grad), None)
        plan = self.plan()
        return trained is not None and plan is not None and plan.holds(trained)

    def manage(self, make_plan: MakePlan) -> None:
        """Let an engine decide when the optimizer steps, and what to measure."""
        self.managed, self._make_plan, self._plan = True, make_plan, None

    def follow(self, optimizer: Optimizer) -> None:
        """Watch another optimizer from now on, which now holds the parameters."""
        self._optimizer = weakref.ref(optimizer, self._forget)
        self._plan = None

    def become(self, role: Role) -> None:
        """Change the role; the plan is made again if it depends on that."""
        joint, first = self.joint, self.role is Role.FIRST
        self.role = role
        if role is Role.FIRST:
            self.label = ""
        if (joint, first) != (self.joint, role is Role.FIRST):
            self._plan = None

    def relabel(self, label: str) -> None:
        """Change the label."""
        self.label, self._plan = label, None

    def learning_rate(self) -> object:
        """Return the learning rate of the first parameter group, as it is kept there."""
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.param_groups[0].get("lr")

    def plan(self) -> MeasurementPlan | None:
        """Return what to measure, made again when needed; None once the optimizer is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        if self._plan is None or not self._plan.fits(optimizer):
            self._plan = self._make_plan(optimizer, self)
        return self._plan

    def _forget(self, gone: "weakref.ref[Optimizer]") -> None:
        if gone is self._optimizer:
            self._plan = None
