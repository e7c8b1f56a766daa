"""What a Megatron model calls its parameters, the same on all pipeline stages and for all experts.

A stage, or a chunk of the interleaved schedule, numbers its own layers from 0, and a rank its own
experts. Megatron's checkpoints number those of the whole model; so do these names.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mp_agent.probe.optimizers.lookup.module_trees import by_fit
from mp_agent.probe.optimizers.lookup.parameter_names import NamedParameter, name_parameters


def chunks_of(parameters: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the outermost of `modules` that hold the parameters, in the order of their layers."""
    left = set(map(id, parameters))
    chunks: list[nn.Module] = []
    for root in by_fit(modules, parameters):
        held = {id(parameter) for parameter in nn.Module.parameters(root)}
        if left & held:
            chunks.append(root)
            left -= held
    return sorted(chunks, key=_first_layer)


def named_by_chunks(
    parameters: Sequence[torch.Tensor], chunks: Iterable[nn.Module]
) -> list[NamedParameter]:
    """Return parameters, each once, under unique names, in the order in which chunks use them."""
    wanted = set(map(id, parameters))
    given: dict[int, str] = {}
    for chunk in chunks:
        for name, parameter in _named(chunk):
            if id(parameter) in wanted:
                given.setdefault(id(parameter), name)
    places = {identity: place for place, identity in enumerate(given)}
    named = [
        replace(each, place=places.get(id(each.parameter), each.place))
        for each in name_parameters(parameters, None, given)
    ]
    return sorted(named, key=lambda each: each.place)


def _named(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module tree under their global names."""
    open_modules: list[tuple[nn.Module, str, int]] = [(root, "", 0)]
    while open_modules:
        module, path, first_number = open_modules.pop()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}{name}", parameter
        children: list[tuple[nn.Module, str, int]] = []
        for name, child in module._modules.items():
            if child is not None:
                number = _number(name, child, first_number)
                children.append((child, f"{path}{number}.", _first_expert(module, name)))
        open_modules += reversed(children)


def _number(name: str, child: Any, first_number: int) -> str:
    """Return what a child is called in the whole model."""
    if not name.isdigit():
        return name
    layer = getattr(child, "layer_number", None)
    return str(layer - 1) if isinstance(layer, int) else str(int(name) + first_number)


def _first_expert(module: Any, name: str) -> int:
    """Return the number of the first of the experts that a module holds as `name`; else 0."""
    group, own = getattr(module, "ep_group", None), getattr(module, "num_local_experts", None)
    if name != "local_experts" or not isinstance(own, int):
        return 0
    if group is None:
        return 0
    return int(torch.distributed.get_rank(group)) * own


def _first_layer(root: nn.Module) -> int:
    layers: Iterable[Any] = (
        getattr(module, "layer_number", None) for module in nn.Module.modules(root)
    )
    return min((layer for layer in layers if isinstance(layer, int)), default=0)
