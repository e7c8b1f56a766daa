"""Makes measurement plans, and reuses them for optimizers over equal parameters.

Reuses measurement plans for optimizers over equal parameters, one after another.
Making a plan walks over all live objects, which takes longer than a short training. So a plan is
used again for the same parameters; and, once walks have taken more than their share of the time,
for parameters of the same shapes, as the next model of a sweep has them.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.live_objects import LiveObjects, WalkBudget, alive, distinct
from mp_agent.probe.optimizers.parameter_names import (
    has_gradient,
    holders,
    holds_any,
    names_parameters,
    optimizer_parameters,
    root_module,
    strays_of,
    trains_part_of,
)
from mp_agent.probe.optimizers.plan import (
    LayerSlot,
    MeasurementPlan,
    is_frozen,
    make_plan,
    signature_of,
)
from mp_agent.probe.optimizers.roles import Role, WatchedOptimizer
from mp_agent.probe.placement import declarations

PLANS_KEPT = 8
_MADE_AT_MOST = 256

_Like = tuple[torch.Size, torch.dtype, torch.device]


class NewOptimizers:
    """The latest optimizers. Keeps none of them alive.

    candidates_at_most: how many are remembered that may train a part of the run's model.
    """

    def __init__(self, candidates_at_most: int) -> None:
        self._candidates_at_most = candidates_at_most
        self.candidates: list[weakref.ref[Optimizer]] = []
        """Those that may train a part of the run's model."""
        self.unexamined: list[weakref.ref[Optimizer]] = []
        """Those made since the first one's plan, of this model or of any other."""
        self._made: list[weakref.ref[Optimizer]] = []
        """The latest, for a clipping of parameters that none of the watched ones holds."""

    def add(self, optimizer: Optimizer, *, candidate: bool) -> None:
        """Record a new optimizer."""
        reference = weakref.ref(optimizer)
        self._made = [*self._made, reference][-_MADE_AT_MOST:]
        if candidate:
            self.unexamined = [*self.unexamined, reference][-self._candidates_at_most :]

    def find_candidates(
        self,
        optimizer: Optimizer,
        root: nn.Module | None,
        live: LiveObjects,
        identities: Collection[int],
    ) -> None:
        """Choose those that may train what the first optimizer leaves of its model.

        optimizer: the first one, of the module tree `root` and the parameters `identities`. Those
        known of stay known: beyond the budget of walks, not all that live are found.
        """
        known = distinct([*reversed(alive(self._made)), *live.optimizers])
        others = [each for each in reversed(known) if each is not optimizer]
        self.candidates = [
            weakref.ref(each)
            for each in others
            if root is None or trains_part_of(each, root, identities)
        ][-self._candidates_at_most :]
        self.unexamined = []
        self._made = list(map(weakref.ref, others[-_MADE_AT_MOST:]))

    def all(self) -> list[Optimizer]:
        """Return those that still exist."""
        return alive([*self._made, *self.candidates, *self.unexamined])

    @property
    def any_made(self) -> bool:
        """Whether any of the latest still exists."""
        return any(reference() is not None for reference in self._made)

    def pop_ready(
        self, watched: Iterable[Optimizer | None], root: nn.Module | None
    ) -> list[Optimizer]:
        """Remove and return the candidates that have gradients and are not `watched` already.

        root: the run's model. Gradients of another one, which another thread may be training, are
        not read.
        """
        known = {id(each) for each in watched if each is not None}
        self.candidates += [
            weakref.ref(each)
            for each in alive(self.unexamined)
            if root is None or holds_any(root, optimizer_parameters(each))
        ]
        self.unexamined = []
        new = [each for each in alive(self.candidates) if id(each) not in known]
        ready = {id(each) for each in new if has_gradient(each)}
        waiting = [weakref.ref(each) for each in new if id(each) not in ready]
        self.candidates = waiting[-self._candidates_at_most :]
        return [each for each in new if id(each) in ready]

    def pop_holders(self, parameters: Sequence[torch.Tensor]) -> list[Optimizer]:
        """Remove and return those that hold any of `parameters`; if none does, forget all."""
        if not self._made:
            return []
        made = alive(self._made)
        found = holders(made, parameters)
        left = [each for each in made if each not in found] if found else []
        self._made = list(map(weakref.ref, left))
        return found


@dataclass(frozen=True, slots=True)
class _Known:
    """A plan without its parameters, which it does not keep alive."""

    parameters: tuple[TensorRef, ...]
    like: tuple[_Like, ...]
    ranks_in_run: int
    slots: tuple[tuple[str, int, slice | None], ...]
    """Name, place of the parameter in the optimizer, and part."""
    frozen: tuple[int, ...]
    """Places of the parameters that are not trained."""
    plan: MeasurementPlan
    """The plan without slots and frozen parameters."""


class PlanCache:
    """The newest plans of this process."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def remember(self, plan: MeasurementPlan, optimizer: Optimizer, ranks_in_run: int) -> None:
        """Keep a plan that was made for `optimizer`.

        Not one that waits for parameters, or that knows the model's own behind those.
        """
        if plan.waiting or plan.sources or names_parameters(optimizer):
            return
        parameters = tuple(optimizer_parameters(optimizer))
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        known = _Known(
            parameters=tuple(map(TensorRef, parameters)),
            like=tuple(map(_like, parameters)),
            ranks_in_run=ranks_in_run,
            slots=tuple((s.name, places[id(s.parameter)], s.part) for s in plan.slots),
            frozen=tuple(places[id(parameter)] for parameter in plan.frozen),
            plan=replace(plan, slots=(), frozen=(), identities=frozenset()),
        )
        self._known = [known, *self._known[: PLANS_KEPT - 1]]

    def find(
        self, optimizer: Optimizer, label: str, of_run: bool, ranks_in_run: int, *, alike: bool
    ) -> MeasurementPlan | None:
        """Return a known plan for an optimizer of the same parameters; None when there is none.

        alike: whether parameters of the same shapes will do.
        """
        if names_parameters(optimizer):
            return None
        parameters = tuple(optimizer_parameters(optimizer))
        for known in self._known:
            plan = known.plan
            if (plan.label, plan.of_run, known.ranks_in_run) != (label, of_run, ranks_in_run):
                continue
            if plan.declared != declarations.generation:
                continue
            if (
                len(parameters) == len(known.parameters)
                and all(is_frozen(parameters[at]) for at in known.frozen)
                and (_same(known, parameters) or (alike and _alike(known, parameters)))
            ):
                return replace(
                    plan,
                    signature=signature_of(optimizer),
                    identities=frozenset(map(id, parameters)),
                    frozen=tuple(parameters[at] for at in known.frozen),
                    slots=tuple(
                        LayerSlot(name, parameters[at], part) for name, at, part in known.slots
                    ),
                )
        return None


def _same(known: _Known, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether they are the parameters of a known plan, of which no copies are assumed."""
    if any(share.assumed for share in known.plan.shares):
        return False
    pairs = zip(known.parameters, parameters, strict=True)
    return all(reference() is parameter for reference, parameter in pairs)


def _alike(known: _Known, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether parameters that nothing splits or copies resemble those of a known plan."""
    if known.ranks_in_run > 1 or not known.plan.plain:
        return False
    return all(map(_resembles, parameters, known.like))


def _resembles(parameter: torch.Tensor, like: _Like) -> bool:
    return type(parameter) is torch.nn.Parameter and _like(parameter) == like


def _like(parameter: torch.Tensor) -> _Like:
    return parameter.shape, parameter.dtype, parameter.device


class PlanMaker:
    """Knows the module tree of the run's model, and plans that were made before.

    new_optimizers: learns from each plan of the first optimizer which others may join it.
    """

    def __init__(self, ranks_in_run: Callable[[], int], new_optimizers: NewOptimizers) -> None:
        self._ranks_in_run = ranks_in_run
        self._new_optimizers = new_optimizers
        self._model: weakref.ref[nn.Module] | None = None
        """The model that the user named."""
        self.root: weakref.ref[nn.Module] | None = None
        """The module tree of the first one's parameters."""
        self.strays: list[weakref.ref[nn.Module]] = []
        """Modules other than the run's model of which no optimizer held any parameter at first."""
        self._live: LiveObjects | None = None
        self._cache = PlanCache()
        self._walks = WalkBudget()
        self._outside_modules = False
        """Whether the parameters that all live modules were searched for last are in none."""

    def settle(self, model: nn.Module | None) -> None:
        """Use the model that the user named."""
        self._model = None if model is None else weakref.ref(model)

    def find_root_again(self, optimizer: Optimizer) -> None:
        """Find the outermost module again if it is gone: a script may wrap the model again."""
        if self.root is not None and self.root() is None:
            root, _ = self._root_of(list(optimizer_parameters(optimizer)), self.live_objects())
            self.root, self._live = None if root is None else weakref.ref(root), None

    def make(
        self, optimizer: Optimizer, watched: WatchedOptimizer, *, only_one: bool
    ) -> MeasurementPlan:
        """Return what to measure of `optimizer`, which `watched` stands for.

        only_one: no other optimizer is watched.
        """
        ranks = self._ranks_in_run()
        found = self._cache.find(
            optimizer,
            watched.label,
            watched.joint or not watched.label,
            ranks,
            alike=not self._walks.left and only_one,
        )
        if found is not None:
            return found
        live = self.live_objects()
        parameters = list(optimizer_parameters(optimizer))
        known = self.root if watched.joint else self._model
        root = None if known is None or watched.role is Role.SEPARATE else known()
        if root is None or not holds_any(root, parameters):
            root, live = self._root_of(parameters, live)
        plan = make_plan(optimizer, live, root, ranks, watched.label, joint=watched.joint)
        self._cache.remember(plan, optimizer, ranks)
        if watched.role is Role.FIRST:
            self.root = None if root is None else weakref.ref(root)
            self._new_optimizers.find_candidates(optimizer, root, live, plan.identities)
            optimizers = [*live.optimizers, *self._new_optimizers.all(), optimizer]
            self.strays = list(map(weakref.ref, strays_of(live.modules, root, optimizers)))
        self._live = None
        return plan

    def trains_rest_of_model(self, optimizer: Optimizer, held: Collection[int]) -> bool:
        """Return whether an optimizer trains parameters of the model that no other optimizer has.

        held: ids of the others' parameters. For a model that is no module: all that is in none.
        """
        root = None if self.root is None else self.root()
        if root is not None:
            return trains_part_of(optimizer, root, held)
        parameters = list(optimizer_parameters(optimizer))
        found = root_module(self.live_objects().modules, parameters)
        self._live = None
        return found is None and set(held).isdisjoint(map(id, parameters))

    def live_objects(self) -> LiveObjects:
        """Return the live modules and optimizers; the same until the next plan is made."""
        if self._live is None:
            self._live = self._walks.walk()
        return self._live

    def forget_live_objects(self) -> None:
        """Walk again at the next plan; keep nothing alive until then."""
        self._live = None

    def _root_of(
        self, parameters: Sequence[torch.Tensor], live: LiveObjects
    ) -> tuple[nn.Module | None, LiveObjects]:
        """Return the module tree of `parameters`, and the live objects among which it was found.

        One that is missing among a part of the objects is searched for among all, unless parameters
        have turned out before to be in no module.
        """
        root = root_module(live.modules, parameters)
        if root is None and not self._walks.complete and not self._outside_modules:
            live = self._walks.walk(whole=True)
            root = root_module(live.modules, parameters)
        if self._walks.complete:
            self._outside_modules = root is None
        return root, live
