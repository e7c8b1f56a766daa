"""Which optimizers of this process are watched, and which of them train the run's model."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.engine import (
    Engine,
    EnginePlan,
    OwningEngine,
    unheld_by_engines,
)
from mp_agent.probe.optimizers.live_objects import alive, distinct
from mp_agent.probe.optimizers.parameter_names import (
    has_gradient,
    held_parameters,
    holders,
    holds_any,
    optimizer_parameters,
    root_module,
    unheld_gradients,
    untouched,
)
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.plan_maker import NewOptimizers, PlanMaker
from mp_agent.probe.optimizers.roles import OptimizerRoles, Role, WatchedOptimizer
from mp_agent.ring.interruptions import pass_on

OPTIMIZERS_AT_MOST = 8

_LEFT_OUT = f"more than {OPTIMIZERS_AT_MOST} optimizers"
NORM_LEFT_OUT = f"{_LEFT_OUT} of one model, and so the norms of all their gradients together"


class OptimizerRegistry:
    """The optimizers seen at a measuring point; the first of them trains the run's model.

    Others that train parts of the same model by the same backward are joint with it. They become
    candidates as soon as they have gradients, before they step; those that step after a backward of
    their own (a GAN in one module) turn out to be separate, as those of other models are.

    Of optimizers that hold the same parameters (one that wraps another, ZeroRedundancyOptimizer's
    own part, a successor) only one counts. When the first is gone, the next one seen takes over.

    left_out: those that train a part of the run's model, and are too many to be watched.
    """

    def __init__(
        self, note_unsupported: Callable[[str], None], ranks_in_run: Callable[[], int]
    ) -> None:
        self.note_unsupported = note_unsupported
        self.ranks_in_run = ranks_in_run
        self.roles = OptimizerRoles()
        self.left_out = weakref.WeakSet[Optimizer]()
        self._new = NewOptimizers(OPTIMIZERS_AT_MOST)
        self._plan_maker = PlanMaker(ranks_in_run, self._new)
        self._overtaken: weakref.ref[Optimizer] | None = None
        """The first optimizer before the one that has taken its place."""
        self._numbers: WatchedOptimizer | None = None
        """Is the first only if no other one has stepped by its second step."""
        self._trained: _Trained | None = None
        self._searched = False
        """All live objects were searched for the holders of clipped parameters."""

    def settle(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        """Use the model and the first optimizer that the user named."""
        self._plan_maker.settle(model)
        if optimizer is not None and (watched := self.of(optimizer)) is not None:
            watched.become(Role.FIRST)

    @property
    def first(self) -> WatchedOptimizer | None:
        """The optimizer whose steps are the run's."""
        return next((each for each in self.roles.watched if each.role is Role.FIRST), None)

    @property
    def root(self) -> nn.Module | None:
        """The outermost module of the run's model, once the first plan has found it."""
        root = self._plan_maker.root
        return None if root is None else root()

    @property
    def known(self) -> tuple[WatchedOptimizer, ...]:
        """All of them, in the order in which they came."""
        return tuple(self.roles.watched)

    def made(self, optimizer: Optimizer) -> None:
        """Record a new optimizer; the first plan finds earlier ones itself."""
        self._new.add(optimizer, candidate=bool(self.roles.watched))

    @property
    def knows_any(self) -> bool:
        """Whether an optimizer was made since the hooks are installed, or has stepped."""
        return bool(self.roles.watched) or self._new.any_made

    def gradients_cleared(self, owner: Optimizer | nn.Module) -> None:
        """Note of which optimizers gradients are about to be cleared; by a module, of new ones."""
        never = self.roles.never_stepped
        if isinstance(owner, Optimizer):
            never.clears((owner,))
            return
        made = [each for each in distinct(self._new.all()) if each not in never.stepped]
        never.clears(each for each in made if holds_any(owner, optimizer_parameters(each)))

    def expected_to_step(self) -> list[Optimizer]:
        """Return the optimizers that are watched; else those with gradients, of all live ones."""
        watched = (each.optimizer for each in self.roles.watched)
        found = [each for each in watched if each is not None]
        if not found:
            found = list(filter(has_gradient, distinct(self._new.all())))
        if not found:
            found = list(filter(has_gradient, self._plan_maker.live_objects().optimizers))
            self._plan_maker.forget_live_objects()
        return found

    def trains_any(self) -> bool:
        """Return whether any parameter requires gradients, those of all live modules."""
        modules = self._plan_maker.live_objects().modules
        self._plan_maker.forget_live_objects()
        own = (vars(module).get("_parameters") or {} for module in modules)
        return any(
            each is not None and each.requires_grad for held in own for each in held.values()
        )

    def of(self, optimizer: Optimizer) -> WatchedOptimizer | None:
        """Return what is watched for steps of `optimizer`; None when there is nothing."""
        for watched in self.roles.watched:
            if watched.is_of(optimizer):
                if watched.role is not Role.FIRST:
                    self._replace_gone_first(watched)
                return watched
        return self._watch(optimizer)

    def managed_by(self, engine: Engine) -> WatchedOptimizer | None:
        """Return the watched optimizer that an engine steps; None when it has none."""
        if (optimizer := engine.optimizer) is None:
            return None
        if not isinstance(engine, OwningEngine):
            return self.of(optimizer)
        found = next((watched for watched in self.roles.watched if watched.is_of(optimizer)), None)
        if found is None:
            self.roles.drop_gone()
            found = self._add(optimizer, Role.FIRST if self.first is None else Role.SEPARATE)
        if found is not None and not found.managed:
            found.manage(lambda _, watched: self._make_engine_plan(engine, watched))
        return found

    def begins_another_model(self) -> bool:
        """Return whether the run trains another model than when this was called last."""
        first, before = self.first, self._trained
        optimizer = None if first is None else first.optimizer
        if first is None or optimizer is None or first.managed:
            return False
        if before is not None and before.by is first:
            before.root = before.root or _reference_to(self.root)
            return False
        held = list(optimizer_parameters(optimizer))
        self._trained = _Trained(
            first, [TensorRef(each) for each in held], _reference_to(self.root)
        )
        return before is not None and not before.holds_any(held)

    def plans_of_run(self) -> list[MeasurementPlan]:
        """Return the plans of those whose gradients are the run's."""
        return [plan for each in self.roles.of_run if (plan := each.plan()) is not None]

    def together(self, watched: WatchedOptimizer) -> list[WatchedOptimizer]:
        """Return all whose gradients are measured when those of `watched` are."""
        watched.plan(whole=True)  # the first one's finds the candidates
        if not watched.of_run:
            return [watched]
        if self._new.candidates or self._new.unexamined:
            self._add_candidates()
        found = [each for each in self.roles.watched if each.role is not Role.SEPARATE]
        for other in found:
            if other is not watched:
                other.plan(whole=True)
        return found

    def trains_the_model(self, watched: WatchedOptimizer) -> bool:
        """Return whether `watched` holds parameters of the module tree of the run's."""
        root, optimizer = self.root, watched.optimizer
        if root is None or optimizer is None:
            return False
        return holds_any(root, optimizer_parameters(optimizer))

    def unheld_gradients(self, *, strays: bool) -> list[tuple[str, nn.Parameter]]:
        """Return parameters of the run's model that have gradients and no optimizer, with names.

        Not those of modules in evaluation mode, such as a pretrained network that a loss compares
        features by. An optimizer that does not step yet holds what it holds.

        strays: whether modules count that are in no model and of which no optimizer holds any
        parameter, such as layers in a plain list; another thread may not be training them. Where
        none of the optimizers' own parameters has a gradient, all live modules count then.
        """
        first = self.first
        plan = None if first is None else first.plan()
        if plan is None:
            return []
        if any(each.managed for each in self.roles.watched):
            others = {id(each) for own in self._new.all() for each in optimizer_parameters(own)}
            found = unheld_by_engines(self.plans())
            return [(name, each) for name, each in found if id(each) not in others]
        if first is not None and (optimizer := first.optimizer) is not None:
            self._plan_maker.find_root_again(optimizer)
        root = self.root
        held = {id(each) for other in self._new.all() for each in optimizer_parameters(other)}
        held.update(identity for own in self.plans() for identity in own.identities)
        modules = [] if root is None else [root]
        if any(slot.parameter.grad is not None for slot in plan.slots):
            held.update(id(source()) for own in self.plans() for source in own.used_sources)
            if strays:
                modules += untouched(alive(self._plan_maker.strays), held)
        elif strays:
            root, modules = None, list(self._plan_maker.live_objects().modules)
            self._plan_maker.forget_live_objects()
        found = unheld_gradients(modules, held, root)
        if found:  # by optimizers that were made before the probe, and train nothing yet
            live = self._plan_maker.live_objects().optimizers
            self._plan_maker.forget_live_objects()
            held.update(id(each) for other in live for each in optimizer_parameters(other))
        return [(name, each) for name, each in found if id(each) not in held]

    def awaits_more(self) -> bool:
        """Return whether the backward made gradients that an optimizer may be made for only now.

        Some scripts make one for each parameter, right before its first step. Of parameters that
        are in no module it is not known.
        """
        first = self.first
        if first is None or first.managed:
            return False
        try:
            return self.root is None or bool(self.unheld_gradients(strays=False))
        except Exception as error:  # of an optimizer that cannot be read
            pass_on(error)
            return False

    def trained_share(self) -> float | None:
        """Return the share of the elements of the run's model that its optimizers train."""
        if (root := self.root) is None:
            return None
        plans = self.plans_of_run()
        held = {identity for plan in plans for identity in plan.identities}
        held.update(id(source()) for plan in plans for source in plan.sources)
        sizes = [
            (each, int(getattr(each, "ds_numel", each.numel())))  # of DeepSpeed, on all ranks
            for _, each in held_parameters(root)
            if not is_lazy(each)
        ]
        trained = sum(size for each, size in sizes if each.requires_grad and id(each) in held)
        total = sum(size for _, size in sizes)
        return trained / total if total and trained else None

    def returns(self, watched: WatchedOptimizer) -> bool:
        """Return whether `watched` was the first until another one took its place."""
        overtaken = None if self._overtaken is None else self._overtaken()
        return overtaken is not None and watched.is_of(overtaken)

    def make_first(self, watched: WatchedOptimizer) -> dict[str, str]:
        """Make the model of `watched` the run's, and drop the optimizers of the one before.

        Returns the new labels, by the old ones, of those that train it.
        """
        before = None if self.first is None else self.first.optimizer
        if before is None or self.returns(watched):
            self._overtaken = None
        else:
            self._overtaken = weakref.ref(before)
        self.roles.watched = [
            each for each in self.roles.watched if each is watched or each.role is Role.SEPARATE
        ]
        labels = {watched.label: ""}
        self.left_out.clear()
        watched.become(Role.FIRST)
        for other in self.roles.watched:
            together = other.stepped_in_pass == watched.stepped_in_pass
            optimizer = other.optimizer
            if other is watched or not together or optimizer is None:
                continue
            if self._trains_part_of_run(optimizer):
                other.become(Role.JOINT)
                old_label = other.label
                other.relabel(self.roles.free_label())
                labels[old_label] = other.label
        return labels

    def holding(self, parameters: Sequence[torch.Tensor]) -> list[WatchedOptimizer]:
        """Return those that hold any of `parameters`.

        Before the first step they may have to be searched for, once, among the live objects; those
        that were made since, among these.
        """
        if not self.roles.watched and not self._searched and parameters:
            for optimizer in holders(self._plan_maker.live_objects().optimizers, parameters):
                self.of(optimizer)
            self._searched = True  # not before: another thread would not find its own meanwhile
            if not self.roles.watched:
                self._plan_maker.forget_live_objects()
        found = self._known_holders(parameters)
        if not found:
            for optimizer in self._new.pop_holders(parameters):
                self.of(optimizer)
            found = self._known_holders(parameters)
        if found:
            # Before its gradients are clipped: a label of its own would be measured apart.
            self._replace_gone_first(found[0])
        return found

    def _replace_gone_first(self, watched: WatchedOptimizer) -> None:
        if watched is self._numbers and not watched.stepped_in_pass:
            return
        if not any(each.alive and each.role is Role.FIRST for each in self.roles.watched):
            self.roles.replace_first(watched)

    def _known_holders(self, parameters: Sequence[torch.Tensor]) -> list[WatchedOptimizer]:
        alone = len(self.roles.watched) <= 1
        of_any = map(id, _with_gradient(parameters)) if alone else {id(each) for each in parameters}
        return [
            watched
            for watched in self.roles.watched
            if (plan := watched.plan()) is not None and not plan.identities.isdisjoint(of_any)
        ]

    def plans(self) -> list[MeasurementPlan]:
        """Return the plans of all, the first optimizer's first; those on another device are out."""
        if len(self.roles.watched) == 1:
            plan = self.roles.watched[0].plan()
            return [] if plan is None else [plan]
        found = [plan for watched in self.roles.watched if (plan := watched.plan()) is not None]
        found.sort(key=lambda plan: plan.label)
        usable = [plan for plan in found if plan.device == found[0].device]
        if len(usable) < len(found):
            self.note_unsupported("optimizers on several devices")
        return usable

    def trains_in_several_threads(self) -> bool:
        """Return whether other threads, which still run, train what is watched as well."""
        used = {each.thread for each in self.roles.watched if each.thread is not None}
        if len(used) <= 1:
            return False
        return len(used & {thread.ident for thread in threading.enumerate()}) > 1

    def _watch(self, optimizer: Optimizer) -> WatchedOptimizer | None:
        """Watch a new optimizer, unless all of its parameters are watched already."""
        self.roles.drop_gone()
        try:
            held = {id(parameter) for parameter in optimizer_parameters(optimizer)}
        except Exception as error:
            pass_on(error)
            self.note_unsupported(f"optimizers of type {type(optimizer).__name__}")
            return None
        if not held:
            return None
        for watched in self.roles.watched:
            plan = watched.plan()
            if plan is not None and not watched.managed and plan.identities <= held:
                if len(held) > len(plan.identities) and not self.roles.has_just_stepped(watched):
                    self._let_follow(watched, optimizer, held)
                return watched
            if plan is not None and not watched.stepped_in_pass and held < plan.identities:
                return watched  # known by clipping alone; it follows the one that steps
        if self.first is None:
            if self._trains_numbers_of_no_model(optimizer):
                self._numbers = self._add(optimizer, Role.SEPARATE)
                return self._numbers
            return self._add(optimizer, Role.FIRST)
        joint = self._trains_part_of_run(optimizer)
        return self._add(optimizer, Role.CANDIDATE if joint else Role.SEPARATE)

    def _add(self, optimizer: Optimizer, role: Role) -> WatchedOptimizer | None:
        if len(self.roles.watched) == OPTIMIZERS_AT_MOST:
            self._leave_out(optimizer, role)
            return None
        self.left_out.discard(optimizer)
        label = "" if role is Role.FIRST else self.roles.free_label()
        self.roles.watched.append(WatchedOptimizer(label, role, optimizer, self._make_plan))
        return self.roles.watched[-1]

    def _leave_out(self, optimizer: Optimizer, role: Role) -> None:
        """Report an optimizer that is not watched; without its part the run's norm is none."""
        if role is Role.CANDIDATE:
            self.left_out.add(optimizer)
        self.note_unsupported(NORM_LEFT_OUT if role is Role.CANDIDATE else _LEFT_OUT)

    def _let_follow(self, watched: WatchedOptimizer, optimizer: Optimizer, held: set[int]) -> None:
        """Replace the optimizer of `watched` by one that holds its parameters and maybe more."""
        self.roles.watched = [
            each
            for each in self.roles.watched
            if each is watched or (plan := each.plan()) is None or not plan.identities <= held
        ]
        watched.follow(optimizer)

    def _add_candidates(self) -> None:
        """Watch those that are about to train a part of the run's model."""
        known = [each.optimizer for each in self.roles.watched]
        for optimizer in self._new.pop_ready(known, self.root):
            if any(watched.is_of(optimizer) for watched in self.roles.watched):
                continue
            if self._trains_part_of_run(optimizer):
                self._add(optimizer, Role.CANDIDATE)

    def _trains_part_of_run(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer trains what the first one leaves of its model."""
        first = self.first
        if first is None or first.managed or first.plan() is None:
            return False
        held = {identity for plan in self.plans_of_run() for identity in plan.identities}
        return self._plan_maker.trains_rest_of_model(optimizer, held)

    def _trains_numbers_of_no_model(self, optimizer: Optimizer) -> bool:
        """Return whether it has single numbers of no model alone, and another one has a model.

        Soft actor-critic steps its temperature first; the run is that of the networks. A module
        around a single number is no model.
        """
        parameters = list(optimizer_parameters(optimizer))
        if any(is_lazy(each) or each.numel() != 1 for each in parameters):
            return False
        live = self._plan_maker.live_objects()
        if _trains_a_model(live.modules, parameters):
            return False
        others = distinct([*self._new.all(), *live.optimizers])
        held = [list(optimizer_parameters(each)) for each in others if each is not optimizer]
        self._plan_maker.forget_live_objects()
        return any(_trains_a_model(live.modules, each) for each in held)

    def _make_engine_plan(self, engine: OwningEngine, watched: WatchedOptimizer) -> MeasurementPlan:
        plan = engine.make_plan(watched.label)
        if watched.role is Role.FIRST and isinstance(plan, EnginePlan) and plan.root is not None:
            self._plan_maker.root = plan.root
        return plan

    def _make_plan(self, optimizer: Optimizer, watched: WatchedOptimizer) -> MeasurementPlan:
        return self._plan_maker.make(optimizer, watched, only_one=len(self.roles.watched) <= 1)


@dataclass(slots=True, eq=False)
class _Trained:
    """What the run trains. Keeps neither the model nor its parameters alive."""

    by: WatchedOptimizer
    parameters: Sequence[TensorRef]
    root: "weakref.ref[nn.Module] | None"

    def holds_any(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether any of `parameters` was trained, or is in the model that was."""
        known = {id(each) for own in self.parameters if (each := own()) is not None}
        root = None if self.root is None else self.root()
        trained = any(id(each) in known for each in parameters)
        return trained or (root is not None and holds_any(root, parameters))


def _trains_a_model(modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether any of `parameters` is in a module of more than a single number."""
    root = root_module(modules, parameters)
    held = [] if root is None else [each for _, each in held_parameters(root)]
    return len(held) > 1 or any(is_lazy(each) or each.numel() != 1 for each in held)


def _reference_to(module: nn.Module | None) -> "weakref.ref[nn.Module] | None":
    """Return a reference that does not keep a module alive."""
    return None if module is None else weakref.ref(module)


def _with_gradient(parameters: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Return those of `parameters` that are trained, or the first: others may be no optimizer's."""
    if not any(parameter.grad is not None for parameter in parameters):
        return parameters[:1]
    return (parameter for parameter in parameters if parameter.grad is not None)
