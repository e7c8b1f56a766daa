"""The parameters that an optimizer holds, and which of several optimizers hold given ones."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.optimizers.lookup.module_trees import holds_any


def optimizer_parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def names_parameters(optimizer: Optimizer) -> bool:
    """Return whether the optimizer was given names for its parameters (torch ≥ 2.6)."""
    return any("param_names" in group for group in optimizer.param_groups)


def has_gradient(optimizer: Optimizer) -> bool:
    """Return whether there is a gradient for an optimizer to use."""
    return any(parameter.grad is not None for parameter in optimizer_parameters(optimizer))


def holders(optimizers: Iterable[Optimizer], parameters: Sequence[torch.Tensor]) -> list[Optimizer]:
    """Return the optimizers that hold any of `parameters`, in the order in which these come.

    Those whose parameters are all held by another one are left out: parts of it, or their copies.
    """
    order = {id(parameter): index for index, parameter in reversed(list(enumerate(parameters)))}
    held = {
        optimizer: {id(parameter) for parameter in optimizer_parameters(optimizer)}
        for optimizer in optimizers
    }
    chosen: list[Optimizer] = []
    for optimizer in sorted(held, key=lambda each: -len(held[each])):
        if not order.keys().isdisjoint(held[optimizer]) and not any(
            held[optimizer] <= held[other] for other in chosen
        ):
            chosen.append(optimizer)
    return sorted(chosen, key=lambda each: min(order.get(i, len(order)) for i in held[each]))


def trains_part_of(optimizer: Optimizer, root: nn.Module | None, held: Collection[int]) -> bool:
    """Return whether an optimizer has parameters of `root` and none that are `held` already."""
    own = list(optimizer_parameters(optimizer))
    apart = not any(id(parameter) in held for parameter in own)
    return root is not None and apart and holds_any(root, own)
