"""Where Megatron's optimizers keep gradients, and the model's names of what they step.

Where Megatron's optimizers keep the gradients that this rank is about to step with.
DistributedDataParallel adds gradients up in `main_grad` of each parameter, a part of a flat buffer,
and reduces them there: all of them, or with the distributed optimizer this rank's slice of each
bucket. The optimizers copy from there before they unscale and clip. Without that wrapper they use
`grad`.

What a Megatron model calls its parameters, the same on all pipeline stages and for all experts.
A stage, or a chunk of the interleaved schedule, numbers its own layers from 0, and a rank its own
experts. Megatron's checkpoints number those of the whole model; so do these names.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mp_agent.probe.optimizers.engine import Found
from mp_agent.probe.optimizers.parameter_names import NamedParameter, by_fit, name_parameters


class Hold(Enum):
    """How ranks hold the gradients that they reduce together."""

    COPIED = "dp"
    """Each has all of them."""

    SLICED = "zero1"
    """Each has a slice of the flat buffer: the distributed optimizer."""

    DEALT = "layer_wise"
    """Each steps whole parameters, that no other steps: the layer-wise optimizer."""


@dataclass(frozen=True, slots=True)
class GradientPart:
    """The part of a parameter that this rank steps, `elements` from `start` of the flat tensor.

    No elements: other ranks step the parameter. leaf: the optimizer that holds it, there or here.
    """

    parameter: torch.Tensor
    start: int
    elements: int
    hold: Hold
    leaf: Any


class BegunReductions:
    """The groups of buckets of which a reduction has begun since the last step."""

    def __init__(self) -> None:
        self._owner: type | None = None
        """The class of those that say so."""
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()

    def follow(self, owner: type) -> None:
        """Know that groups of this class, and no others, say when they begin."""
        self._owner = owner

    def add(self, group: Any) -> None:
        """Note that a group begins."""
        self._groups.add(group)

    def clear(self) -> None:
        """Forget them: their gradients have been used."""
        self._groups.clear()

    def have_all(self, groups: Iterable[Any]) -> bool:
        """Return whether all of these have begun, or do not say so."""
        return all(type(each) is not self._owner or each in self._groups for each in groups)


def leaves_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that a chain of them consists of, without those that have nothing."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]
    return [leaf for each in chained for leaf in leaves_of(each)]


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the optimizers that a chain of Megatron's wraps."""
    wrapped = (getattr(leaf, "optimizer", None) for leaf in leaves_of(optimizer))
    return [each for each in wrapped if isinstance(each, Optimizer)]


def parts_of(optimizer: Any) -> list[GradientPart]:
    """Return the parts of all parameters that this optimizer and those of other ranks step.

    Raises AttributeError or similar where it is built otherwise than known.
    """
    dealt = _dealt_by(optimizer)
    if dealt is not None:
        return list(_dealt_parts(optimizer, dealt))
    return [part for leaf in leaves_of(optimizer) for part in _parts_of_leaf(leaf)]


def finder(parts: Iterable[GradientPart]) -> Callable[[Any], Found]:
    """Return what finds the gradients of these parts in their optimizer, and keeps none alive."""
    places = {
        id(part.parameter): (part.start, part.elements) for part in parts if part.elements > 0
    }

    def find(optimizer: Any) -> Found:
        found: dict[int, torch.Tensor] = {}
        for leaf in leaves_of(optimizer):
            for parameter in model_parameters(leaf):
                place = places.get(id(parameter))
                gradient = _gradient(parameter)
                if place is not None and gradient is not None:
                    whole = place == (0, gradient.numel())
                    found[id(parameter)] = (
                        gradient if whole else gradient.view(-1).narrow(0, *place)
                    )
        return found

    return find


def model_parameters(leaf: Any) -> Iterator[torch.Tensor]:
    """Yield the model's parameters of which this rank steps a part with one optimizer."""
    if hasattr(leaf, "model_float16_groups"):
        groups: Iterable[Any] = chain(leaf.model_float16_groups, leaf.model_fp32_groups)
    elif hasattr(leaf, "float16_groups"):
        groups = chain(leaf.float16_groups, leaf.fp32_from_fp32_groups)
    else:
        groups = (group["params"] for group in leaf.optimizer.param_groups)
    return chain.from_iterable(groups)


def masters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the copies of parameters, or of slices of them, that are stepped in their place."""
    for leaf in leaves_of(optimizer):
        own = [_local(parameter).untyped_storage() for parameter in model_parameters(leaf)]
        memory = {storage.data_ptr() for storage in own}
        for group in leaf.optimizer.param_groups:
            for tensor in group["params"]:
                if _local(tensor).untyped_storage().data_ptr() not in memory:
                    yield tensor


def _gradient(parameter: Any) -> torch.Tensor | None:
    main = getattr(parameter, "main_grad", None)
    gradient: torch.Tensor | None = parameter.grad if main is None else main
    return None if gradient is None else _local(gradient)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parts_of_leaf(leaf: Any) -> Iterator[GradientPart]:
    if not hasattr(leaf, "model_float16_groups"):
        for parameter in model_parameters(leaf):
            yield GradientPart(parameter, 0, _local(parameter).numel(), Hold.COPIED, leaf)
        return
    for buffer in leaf.buffers:
        for parameter in buffer.param_index_map:
            if parameter in leaf.model_param_gbuf_map:
                own = leaf._get_model_param_range_map(parameter)["param"]
                yield GradientPart(parameter, own.start, own.end - own.start, Hold.SLICED, leaf)
            else:
                yield GradientPart(parameter, 0, 0, Hold.SLICED, leaf)


def _dealt_by(optimizer: Any) -> list[torch.Tensor] | None:
    """Return the parameters that a layer-wise optimizer has dealt to the ranks, this one's too."""
    lists = (
        getattr(optimizer, name, None) for name in ("dp_cp_params_list", "expt_dp_params_list")
    )
    dealt = [parameter for ranks in lists if ranks for own in ranks for parameter in own]
    return dealt or None


def _dealt_parts(optimizer: Any, dealt: Iterable[torch.Tensor]) -> Iterator[GradientPart]:
    leaves = leaves_of(optimizer)
    own = {id(parameter): leaf for leaf in leaves for parameter in model_parameters(leaf)}
    for parameter in dealt:
        leaf = own.pop(id(parameter), None)
        elements = 0 if leaf is None else parameter.numel()
        yield GradientPart(parameter, 0, elements, Hold.DEALT, leaf or leaves[0])
    for leaf in leaves:  # experts that each rank keeps all of
        for parameter in model_parameters(leaf):
            if id(parameter) in own:
                yield GradientPart(parameter, 0, parameter.numel(), Hold.COPIED, leaf)


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
