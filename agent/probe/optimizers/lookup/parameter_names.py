"""Names of an optimizer's parameters: its own, those of the module tree, or made up."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from mp_agent.probe.optimizers.lookup.module_trees import by_fit, held_parameters
from mp_agent.probe.optimizers.lookup.optimizer_parameters import optimizer_parameters
from mp_agent.probe.placement.megatron import model_parameters

_OUTSIDE_THE_TREE = 1 << 40


_WRAPPER_COMPONENTS = frozenset(
    {
        "module",
        "_forward_module",  # Lightning's Fabric
        "_fsdp_wrapped_module",
        "_orig_mod",
        "_checkpoint_wrapped_module",
    }
)


_PEFT_PREFIX = ["base_model", "model"]
"""Of every parameter in PEFT's model: that, and the tuner inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter of the optimizer under its layer name."""

    name: str
    parameter: torch.Tensor
    place: int
    """Where it stands in the module tree; those outside come after it."""


def named_parameters(
    optimizer: Optimizer,
    root: nn.Module | None,
    modules: Sequence[nn.Module] = (),
    sources: Sequence[torch.Tensor] = (),
) -> list[NamedParameter]:
    """Return the optimizer's parameters, each once, under unique names, in module order.

    Names are the optimizer's own `param_names` where it has them, else those of the module tree. A
    parameter outside the tree comes last: under the class of the one of `modules` that holds it,
    such as a critic trained together with its actor, else numbered.

    sources: the model's parameters that the optimizer's are copies of, where it holds none of a
    module. They give their names to copies of the same shapes in the same order.
    """
    parameters = list(optimizer_parameters(optimizer))
    given = {
        **_names_elsewhere(parameters, root, modules, sources),
        **_names_in_optimizer(optimizer),
    }
    return name_parameters(parameters, root, given)


def name_parameters(
    parameters: Iterable[torch.Tensor], root: nn.Module | None, given: Mapping[int, str]
) -> list[NamedParameter]:
    """Return parameters, each once, under unique names, in module order.

    given: names that come before those of the module tree, by `id` of the parameter.
    """
    held = {id(parameter): parameter for parameter in parameters}
    names: dict[int, str] = {}
    places: dict[int, int] = {}
    for place, (name, parameter) in enumerate(held_parameters(root) if root is not None else ()):
        if id(parameter) in held:
            names[id(parameter)], places[id(parameter)] = name, place
    for index, identity in enumerate(held):
        names.setdefault(identity, f"parameter{index}")
    names.update(given)
    short = _unique({identity: strip_wrappers(name) for identity, name in names.items()}, names)
    return [
        NamedParameter(
            name=name, parameter=held[identity], place=places.get(identity, _OUTSIDE_THE_TREE)
        )
        for identity, name in short.items()
    ]


def strip_wrappers(name: str) -> str:
    """Return a parameter name without what DDP, FSDP, torch.compile or PEFT put in."""
    kept = [part for part in name.split(".") if part not in _WRAPPER_COMPONENTS]
    if kept[: len(_PEFT_PREFIX)] == _PEFT_PREFIX:
        del kept[: len(_PEFT_PREFIX)]
    return ".".join(kept) or name


def _names_elsewhere(
    parameters: Sequence[torch.Tensor],
    root: nn.Module | None,
    modules: Sequence[nn.Module],
    sources: Sequence[torch.Tensor],
) -> dict[int, str]:
    """Return names of the parameters outside `root`, by `id`: class of their module, and path."""
    inside = set() if root is None else {id(each) for _, each in held_parameters(root)}
    left = [parameter for parameter in parameters if id(parameter) not in inside]
    stepped_for = model_parameters(left, modules)
    if left and [each.shape for each in left] == [each.shape for each in sources]:
        stepped_for = list(sources)
    models = {id(each): id(model) for each, model in zip(left, stepped_for, strict=True)}
    names: dict[int, str] = {}
    classes: Counter[str] = Counter()
    trees = by_fit(modules, stepped_for) if left else []
    for module in trees:
        held = {id(parameter): name for name, parameter in held_parameters(module)}
        own = [each for each, model in models.items() if model in held and each not in names]
        if module is root or (root is None and module is trees[0]):  # of an optimizer's own tensors
            names.update({identity: held[models[identity]] for identity in own})
        elif own:
            kind = _class_name(module)
            classes[kind] += 1
            prefix = kind if classes[kind] == 1 else f"{kind}{classes[kind]}"
            names.update({identity: f"{prefix}.{held[models[identity]]}" for identity in own})
    return names


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class, below its wrappers."""
    while len(module._modules) == 1:
        ((name, child),) = module._modules.items()
        if name not in _WRAPPER_COMPONENTS or child is None:
            break
        module = child
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _names_in_optimizer(optimizer: Optimizer) -> dict[int, str]:
    """Return the names that the optimizer was given (torch ≥ 2.6), by `id` of the parameter."""
    return {
        id(parameter): name
        for group in optimizer.param_groups
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
    }


def _unique(short: dict[int, str], full: dict[int, str]) -> dict[int, str]:
    """Return short names, but full ones where short ones collide, numbered where those do too."""
    chosen: dict[int, str] = {}
    taken: set[str] = set()
    for identity, name in short.items():
        if name in taken:
            name = full[identity]
        while name in taken:
            name = f"{name}'"
        taken.add(name)
        chosen[identity] = name
    return chosen
