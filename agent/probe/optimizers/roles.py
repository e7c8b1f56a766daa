"""Watched optimizers, which of them train the run's model, and optimizers that never step."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import count
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe import accelerator
from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.loop_order import GradientUse, any_of
from mp_agent.probe.optimizers.model_mode import ModelMode
from mp_agent.probe.optimizers.parameter_names import has_gradient, optimizer_parameters
from mp_agent.probe.optimizers.plan import MeasurementPlan, change_count, few_elements
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of
from mp_agent.records.columns import LEARNING_RATES_ZERO, OPTIMIZER_NEVER_STEPS

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
        self.of_run = role in (Role.FIRST, Role.JOINT)
        """Whether its steps are steps of the run."""
        self.scaled = True
        self.managed = False
        self.searches = False
        """Whether it has called its closure several times in a step: it may end one without an
        update, as L-BFGS does once it has converged."""
        self.scalars: dict[str, Scalar] = {}
        """Values of its current step alone, by step column."""
        self.stepped_in_pass = 0
        """Number of the last backward before its last step."""
        self.idle_steps = 0
        """Steps of the run since it became a candidate."""
        self.thread: int | None = None
        """The one in which its gradients were measured last."""
        self.use = GradientUse()
        self.mode = ModelMode()
        self.betas_swapped = False
        self._make_plan = make_plan
        self._plan: MeasurementPlan | None = None
        self._optimizer = weakref.ref(optimizer, self._forget)
        self.stepped_last = self._optimizer
        """The one that has: another may hold the same parameters, and take turns with it."""

    @property
    def alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._optimizer() is not None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, until it is gone."""
        return self._optimizer()

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
        self.role, self.of_run = role, role in (Role.FIRST, Role.JOINT)
        if role is Role.FIRST:
            self.label = ""
        if (joint, first) != (self.joint, role is Role.FIRST):
            self._plan = None

    def relabel(self, label: str) -> None:
        """Change the label."""
        self.label, self._plan = label, None

    def learning_rate(self) -> Scalar | None:
        """Return the learning rate of the first parameter group; None where it is no number."""
        optimizer = self._optimizer()
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        return rate if type(rate) is float else snapshot_of(rate)

    def note_rate_0(self, scalars: dict[str, Scalar]) -> None:
        """Add to a step of the run whether all groups so far have rate 0, as the host knows it."""
        if not self.of_run or (optimizer := self._optimizer()) is None:
            return
        all_0 = scalars.get(LEARNING_RATES_ZERO, 1.0) == 1.0
        for group in optimizer.param_groups:
            rate = group.get("lr")
            all_0 = all_0 and isinstance(rate, int | float) and rate == 0.0
        scalars[LEARNING_RATES_ZERO] = float(all_0)

    def plan(self, *, whole: bool = False) -> MeasurementPlan | None:
        """Return what to measure, made again when needed; None once the optimizer is gone.

        whole: whether to look at each of its parameters, once a step, for others in their place.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return None
        if self._plan is None or not self._plan.fits(optimizer, whole=whole):
            self._plan = self._make_plan(optimizer, self)
            self.betas_swapped = _has_swapped_betas(optimizer)
        return self._plan

    def backwards_at_most(self) -> int:
        """Return how many backwards may have made its gradients: each after the first adds."""
        plan = self.plan()
        gradients = [] if plan is None else [slot.parameter.grad for slot in plan.slots]
        return max((1 + change_count(each) for each in gradients if each is not None), default=1)

    def has_swapped_betas(self) -> bool:
        """Return whether betas are in the wrong order now; from then on each step looks again."""
        optimizer = self._optimizer()
        self.betas_swapped = optimizer is not None and _has_swapped_betas(optimizer)
        return self.betas_swapped

    def _forget(self, gone: "weakref.ref[Optimizer]") -> None:
        if gone is self._optimizer:
            self._plan = None


def _has_swapped_betas(optimizer: Optimizer) -> bool:
    return any(_are_swapped(group.get("betas")) for group in optimizer.param_groups)


def _are_swapped(betas: object) -> bool:
    """Return whether, of two, the mean outlives the mean square by at least half."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        return False
    first, second = betas
    if not (isinstance(first, float) and isinstance(second, float)):
        return False
    # Recipes have them next to one another on purpose, as nanochat (0.96, 0.95).
    return first > second and 1.0 - second >= 1.5 * (1.0 - first)


IDLE_STEPS_AT_MOST = 100
"""Steps after which an optimizer that never steps no longer counts."""


class OptimizerRoles:
    """The watched optimizers in the order in which they came, and the passes that they step in.

    A pass begins with a backward of the run. A candidate becomes joint once it has stepped in the
    same pass as the run, and separate once it has stepped in its own pass.
    """

    def __init__(self) -> None:
        self.watched: list[WatchedOptimizer] = []
        self.never_stepped = NeverStepped()
        self._pass = 1
        """Number of the current backward."""

    @property
    def labels_of_run(self) -> set[str]:
        """Labels of the optimizers whose gradients are the run's."""
        return {each.label for each in self.watched if each.role is not Role.SEPARATE}

    @property
    def awaited(self) -> set[str]:
        """The labels of those that became candidates in the step under way."""
        return {
            watched.label
            for watched in self.watched
            if watched.role is Role.CANDIDATE and not watched.idle_steps
        }

    @property
    def of_run(self) -> list[WatchedOptimizer]:
        """The optimizers whose gradients are the run's."""
        return [watched for watched in self.watched if watched.role is not Role.SEPARATE]

    def begin_pass(self) -> bool:
        """Begin the next pass; return whether a candidate turned out to be separate.

        That is one that has stepped alone in the pass that is over.
        """
        alone = [
            watched
            for watched in self.watched
            if watched.role is Role.CANDIDATE and watched.stepped_in_pass == self._pass
        ]
        if alone and any(each.of_run and each.stepped_in_pass for each in self.watched):
            for watched in alone:
                watched.become(Role.SEPARATE)
        else:
            alone = []
        self._pass += 1
        return bool(alone)

    def confirm(self, watched: WatchedOptimizer) -> None:
        """Make a candidate joint if the run has stepped by the same backward."""
        if watched.role is Role.CANDIDATE and any(
            each.of_run and each.stepped_in_pass == self._pass for each in self.watched
        ):
            watched.become(Role.JOINT)

    def stepped(self, watched: WatchedOptimizer) -> None:
        """Record that an optimizer has stepped."""
        watched.stepped_in_pass = self._pass
        if not watched.of_run:
            return
        for other in self.watched:
            if other.role is Role.CANDIDATE:
                if other.stepped_in_pass == self._pass:
                    self.confirm(other)
                else:
                    other.idle_steps += 1
        self.watched = [
            each
            for each in self.watched
            if each.role is not Role.CANDIDATE or each.idle_steps <= IDLE_STEPS_AT_MOST
        ]

    def has_new_gradients(self, watched: WatchedOptimizer) -> bool:
        """Return whether there was a backward since an optimizer stepped last."""
        return self._pass > 1 and watched.stepped_in_pass != self._pass

    def is_outer(self, optimizer: Optimizer, watched: WatchedOptimizer) -> bool:
        """Return whether `optimizer` steps after `watched`'s own without a backward in between.

        It holds the same parameters, and what it steps with is no gradient of a loss (the outer
        optimizer of DiLoCo).
        """
        return self.has_just_stepped(watched) and watched.alive and not watched.is_of(optimizer)

    def has_just_stepped(self, watched: WatchedOptimizer) -> bool:
        """Return whether there was no backward since an optimizer stepped last."""
        return watched.stepped_in_pass == self._pass and self._pass > 1

    def free_label(self) -> str:
        """Return the lowest number that no other optimizer is called by."""
        taken = {watched.label for watched in self.watched}
        return next(label for label in map(str, count(1)) if label not in taken)

    def replace_first(self, watched: WatchedOptimizer) -> None:
        """Make another one the first, which is gone: one that is joint with it, if there is."""
        self.drop_gone()
        joint = [each for each in self.watched if each.joint]
        successor = watched if watched.joint or not joint else joint[0]
        successor.become(Role.FIRST)

    def drop_gone(self) -> None:
        """Stop watching optimizers that no longer exist."""
        self.watched = [watched for watched in self.watched if watched.alive]


_OPTIMIZERS_AT_MOST = 8
_RECENT_STEPS = 16
"""Steps of the run for which an optimizer counts after its gradients were cleared."""


class FewWeights:
    """A few elements of the first, a middle and the last of some parameters, as they were."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        count = len(parameters)
        places = sorted({0, count // 2, count - 1}) if count else []
        self._before = [
            (TensorRef(parameters[place]), bits.clone())
            for place in places
            if (bits := _few_bits(parameters[place])) is not None
        ]

    def kept(self) -> Scalar | None:
        """Return whether they are as they were: 1 or 0, where they are; None where none is known.

        They may have moved to a device since, to which the host's are sent without waiting.
        """
        equal = [
            (bits == before.to(bits.device, non_blocking=True)).all()
            for ref, before in self._before
            if (parameter := ref()) is not None
            and (bits := _few_bits(parameter)) is not None
            and bits.shape == before.shape
            and (bits.device == before.device or accelerator.is_on_host(before.device))
        ]
        if not equal:
            return None
        return scalar_of(torch.stack(accelerator.on_one_device(equal)).all().double())

    @property
    def have_changed(self) -> bool:
        """Whether they are known on the host to have changed."""
        keeps = self.kept()
        return isinstance(keeps, float) and keeps == 0.0


class _Waiting:
    """An optimizer that has not stepped, and what a few of its weights were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.steps = 0
        """Steps of the run since its gradients were cleared last."""
        trained = [each for each in optimizer_parameters(optimizer) if each.grad is not None]
        self.weights = FewWeights(trained)


def _few_bits(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a few elements as bytes, by which NaN equals NaN; None of tensors of other kinds."""
    found = few_elements(parameter.detach())
    return None if found is None else found.view(torch.uint8)


class NeverStepped:
    """Follows optimizers from the first clearing of their gradients to their first step."""

    def __init__(self) -> None:
        self.stepped = WeakSet[Optimizer]()
        """Those that have stepped, that a GradScaler was to step, or that something else steps."""
        self.waiting: list[_Waiting] = []

    def clears(self, optimizers: Iterable[Optimizer]) -> None:
        """Note that the gradients of optimizers are about to be cleared."""
        for optimizer in optimizers:
            if optimizer in self.stepped or not has_gradient(optimizer):
                continue
            known = next((each for each in self.waiting if each.optimizer() is optimizer), None)
            if known is not None:
                known.steps = 0
            elif len(self.waiting) < _OPTIMIZERS_AT_MOST:
                self.waiting.append(_Waiting(optimizer))

    def run_stepped(self, scalars: dict[str, Scalar]) -> None:
        """Add to a step of the run whether one has not stepped, and its weights stay."""
        self.waiting = [each for each in self.waiting if self._still_waits(each)]
        found = any_of(each.weights.kept() for each in self.waiting)
        if found is not None:
            scalars[OPTIMIZER_NEVER_STEPS] = found

    def _still_waits(self, waiting: _Waiting) -> bool:
        waiting.steps += 1
        optimizer = waiting.optimizer()
        if optimizer is None or waiting.steps > _RECENT_STEPS:
            return False
        if waiting.weights.have_changed:
            self.stepped.add(optimizer)
        return optimizer not in self.stepped
