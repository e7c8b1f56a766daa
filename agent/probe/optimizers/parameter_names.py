"""The parameters that optimizers hold, their names in the model, and those that none holds.

Parameters of modules whose gradients are used, or ought to be, but that no optimizer holds.
A script that steps FP32 copies of a 16-bit model makes their gradients of those of the model. An
optimizer that was made before the model was copied, moved or wrapped steps tensors that get none.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from mp_agent.probe.placement.megatron import model_parameters


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
"""Prefix of every parameter in PEFT's model: that, and the tuner inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter of the optimizer under its layer name."""

    name: str
    parameter: torch.Tensor
    place: int
    """Where it is in the module tree; those outside come after it."""


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


_LISTED_CHARACTERS = 70


def outside_modules(
    parameters: Sequence[torch.Tensor], root: nn.Module | None, modules: Sequence[nn.Module]
) -> list[torch.Tensor]:
    """Return the parameters that are in no module; root: the tree that holds most of them."""
    inside = set() if root is None else {id(each) for _, each in held_parameters(root)}
    left = [each for each in parameters if id(each) not in inside]
    if not left or root is None:
        return left  # a root is that of any module
    elsewhere = {id(each) for module in modules for each in module._parameters.values()}
    return [each for each in left if id(each) not in elsewhere]


def sources_of(
    copies: Sequence[torch.Tensor], modules: Sequence[nn.Module], held: Collection[int]
) -> list[nn.Parameter]:
    """Return the model's parameters that an optimizer's own tensors stand for; [] for none.

    copies: tensors of the optimizer that are in no module. Sources of these are parameters of one
    module tree that the optimizer does not hold, of as many elements; with gradients, if there are
    several such trees. Each is that of one copy, if they have the same shapes in this order.
    """
    elements = sum(each.numel() for each in copies)
    found = [
        own
        for module in (_outermost(modules) if elements else ())
        if (own := [p for _, p in held_parameters(module) if p.requires_grad and id(p) not in held])
        and sum(each.numel() for each in own) == elements
    ]
    trained = [own for own in found if any(map(_has_gradient, own))]
    return trained[0] if trained else found[0] if len(found) == 1 else []


def computing_dtype(
    sources: Sequence[torch.Tensor], modules: Sequence[nn.Module]
) -> torch.dtype | None:
    """Return the dtype of most elements of `sources`, or else of what gets gradients in modules."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in sources:
        elements[parameter.dtype] += parameter.numel()
    for module in () if sources else _outermost(modules):
        for _, parameter in held_parameters(module):
            if _has_gradient(parameter):
                elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else None


def unheld_gradients(
    modules: Sequence[nn.Module], held: Collection[int], root: nn.Module | None
) -> list[tuple[str, nn.Parameter]]:
    """Return the modules' parameters, with names, that have gradients and are not `held`.

    Names of what is not in `root`, if that is given, begin with the class of the outermost module.
    Parameters that belong to modules in evaluation mode are left out.
    """
    return [
        (
            strip_wrappers(
                name if root is None or module is root else f"{_class_name(module)}.{name}"
            ),
            parameter,
        )
        for module in _outermost(modules)
        for name, parameter in _trained_parameters(module)
        if id(parameter) not in held and gradient_of(parameter) is not None
    ]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that backward leaves; of Megatron's wrapper the one in its buffer."""
    found = parameter.grad
    return getattr(parameter, "main_grad", None) if found is None else found


def untouched(modules: Iterable[nn.Module], held: Collection[int]) -> list[nn.Module]:
    """Return the modules of which no parameter is `held`, and some are to be trained."""
    found = []
    for module in modules:
        own = list(held_parameters(module))
        if any(each.requires_grad for _, each in own) and not any(id(p) in held for _, p in own):
            found.append(module)
    return found


def strays_of(
    modules: Sequence[nn.Module], root: nn.Module | None, optimizers: Iterable[Optimizer]
) -> list[nn.Module]:
    """Return the outermost modules but `root` of which no optimizer holds any parameter."""
    held = {id(each) for optimizer in optimizers for each in optimizer_parameters(optimizer)}
    return untouched((each for each in _outermost(modules) if each is not root), held)


def _trained_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters that require gradients, each once, of modules in training mode."""
    seen: set[int] = set()
    for path, module in nn.Module.named_modules(root):
        for key, parameter in module._parameters.items() if module.training else ():
            if parameter is None or not (parameter.requires_grad and parameter.is_leaf):
                continue
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{key}" if path else key, parameter


def listed(names: Sequence[str]) -> str:
    """Return some names as one text: as many as are readable, and the number of the others."""
    shown = list(names[:1])
    for name in names[1:]:
        if len(", ".join([*shown, name])) > _LISTED_CHARACTERS:
            break
        shown.append(name)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _outermost(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    contained = {
        id(child) for module in modules for child in module._modules.values() if child is not None
    }
    return (module for module in modules if id(module) not in contained)


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether backward has made a gradient, or Megatron's `main_grad` takes it up."""
    return parameter.requires_grad and (
        parameter.grad is not None or getattr(parameter, "main_grad", None) is not None
    )
