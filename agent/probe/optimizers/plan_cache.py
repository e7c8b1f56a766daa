"""Reuses measurement plans for optimizers over equal parameters, one after another.

Making a plan walks over all live objects, which takes longer than a short training. So a plan is
used again for the same parameters; and, once walks have taken more than their share of the time,
for parameters of the same shapes, as the next model of a sweep has them.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from mp_agent.probe.optimizers.layer_slots import LayerSlot
from mp_agent.probe.optimizers.lookup.optimizer_parameters import (
    names_parameters,
    optimizer_parameters,
)
from mp_agent.probe.optimizers.plan import MeasurementPlan, is_frozen, signature_of
from mp_agent.probe.placement import declarations

PLANS_KEPT = 8

_Like = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class _Known:
    """A plan without its parameters, which it does not keep alive."""

    parameters: tuple["weakref.ref[torch.Tensor]", ...]
    like: tuple[_Like, ...]
    ranks_in_run: int
    slots: tuple[tuple[str, int, slice | None], ...]
    """Name, place of the parameter in the optimizer, and part."""
    frozen: tuple[int, ...]
    """Places of the parameters that are not trained."""
    plan: MeasurementPlan
    """Without slots and frozen parameters."""


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
            parameters=tuple(map(weakref.ref, parameters)),
            like=tuple(map(_like, parameters)),
            ranks_in_run=ranks_in_run,
            slots=tuple((s.name, places[id(s.parameter)], s.part) for s in plan.slots),
            frozen=tuple(places[id(parameter)] for parameter in plan.frozen),
            plan=replace(plan, slots=(), frozen=(), identities=frozenset()),
        )
        self._known = [known, *self._known[: PLANS_KEPT - 1]]

    def find(
        self, optimizer: Optimizer, label: str, joint: bool, ranks_in_run: int, *, alike: bool
    ) -> MeasurementPlan | None:
        """Return a known plan for an optimizer of the same parameters; None when there is none.

        alike: whether parameters of the same shapes will do.
        """
        if names_parameters(optimizer):
            return None
        parameters = tuple(optimizer_parameters(optimizer))
        for known in self._known:
            plan = known.plan
            if (plan.label, plan.joint, known.ranks_in_run) != (label, joint, ranks_in_run):
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
