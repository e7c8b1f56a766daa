"""Makes the measurement plan of an optimizer: finds its modules and names among live objects."""

import weakref
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.optimizers.lookup.live_objects import LiveObjects
from mp_agent.probe.optimizers.lookup.module_trees import holds_any, root_module
from mp_agent.probe.optimizers.lookup.new_optimizers import NewOptimizers
from mp_agent.probe.optimizers.lookup.optimizer_parameters import (
    optimizer_parameters,
    trains_part_of,
)
from mp_agent.probe.optimizers.lookup.walk_budget import WalkBudget
from mp_agent.probe.optimizers.plan import MeasurementPlan, make_plan
from mp_agent.probe.optimizers.plan_cache import PlanCache
from mp_agent.probe.optimizers.watched import Role, WatchedOptimizer


class PlanMaker:
    """Knows the module tree of the run's model, and plans that were made before.

    new_optimizers: learns from each plan of the first optimizer which others may join it.
    """

    def __init__(self, ranks_in_run: Callable[[], int], new_optimizers: NewOptimizers) -> None:
        self._ranks_in_run = ranks_in_run
        self._new_optimizers = new_optimizers
        self._model: weakref.ref[nn.Module] | None = None
        """What the user named."""
        self._root: weakref.ref[nn.Module] | None = None
        """The module tree of the first one's parameters."""
        self._live: LiveObjects | None = None
        self._cache = PlanCache()
        self._walks = WalkBudget()
        self._outside_modules = False
        """Whether the parameters that all live modules were searched for last are in none."""

    def settle(self, model: nn.Module | None) -> None:
        """Use the model that the user named."""
        self._model = None if model is None else weakref.ref(model)

    def note_root(self, root: "weakref.ref[nn.Module]") -> None:
        """Use the module tree that a plan was made of elsewhere."""
        self._root = root

    @property
    def root(self) -> nn.Module | None:
        """The module tree of the run's model, while it lives."""
        return None if self._root is None else self._root()

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
            watched.joint,
            ranks,
            alike=not self._walks.left and only_one,
        )
        if found is not None:
            return found
        live = self.live_objects()
        parameters = list(optimizer_parameters(optimizer))
        known = self._root if watched.joint else self._model
        root = None if known is None or watched.role is Role.SEPARATE else known()
        if root is None or not holds_any(root, parameters):
            root, live = self._root_of(parameters, live)
        plan = make_plan(optimizer, live, root, ranks, watched.label, joint=watched.joint)
        self._cache.remember(plan, optimizer, ranks)
        if watched.role is Role.FIRST:
            self._root = None if root is None else weakref.ref(root)
            self._new_optimizers.find_candidates(optimizer, root, live, plan.identities)
        self._live = None
        return plan

    def trains_rest_of_model(self, optimizer: Optimizer, held: Collection[int]) -> bool:
        """Return whether an optimizer trains what others, of parameters `held`, leave of the model.

        Where the model's parameters are in no module, what is in none either is the rest of it.
        """
        root = self.root
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
