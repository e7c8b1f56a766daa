"""Which module tree holds the parameters of an optimizer, among all live modules."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn


def root_module(
    modules: Sequence[nn.Module], parameters: Iterable[torch.Tensor]
) -> nn.Module | None:
    """Return the module that nothing contains and that covers the most of `parameters`.

    Of equals the one with the fewest parameters and modules of its own wins, and of twins the one
    whose parameters come first: all ranks choose the same.
    """
    ranked = by_fit(modules, parameters)
    return ranked[0] if ranked else None


def holds_any(root: nn.Module, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any of `parameters` is in the module tree."""
    wanted = set(map(id, parameters))
    return any(id(parameter) in wanted for _, parameter in held_parameters(root))


def by_fit(modules: Sequence[nn.Module], parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """Return the modules that nothing contains and that hold any of `parameters`, best first."""
    wanted = {id(parameter): index for index, parameter in enumerate(parameters)}
    contained = {
        id(child) for module in modules for child in module._modules.values() if child is not None
    }
    fits: list[tuple[tuple[int, int, int, int], nn.Module]] = []
    for module in modules:
        if id(module) in contained:
            continue
        held = {id(parameter) for _, parameter in held_parameters(module)}
        found = held & wanted.keys()
        if found:
            size = sum(1 for _ in nn.Module.modules(module))
            first = min(map(wanted.__getitem__, found))
            fits.append(((-len(found), len(held), size, first), module))
    return [module for _, module in sorted(fits, key=lambda fit: fit[0])]


def held_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as they are held, whatever a subclass makes of `named_parameters`."""
    return nn.Module.named_parameters(module)
