"""Parameters of modules whose gradients are used, or ought to be, but that no optimizer holds.

A script that steps FP32 copies of a 16-bit model makes their gradients of those of the model. An
optimizer that was made before the model was copied, moved or wrapped steps tensors that get none.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from mp_agent.probe.optimizers.lookup.module_trees import held_parameters
from mp_agent.probe.optimizers.lookup.parameter_names import strip_wrappers

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


def unheld_gradients(modules: Sequence[nn.Module], held: Collection[int]) -> list[str]:
    """Return the names of the modules' parameters that have gradients and are not `held`."""
    return [
        strip_wrappers(name)
        for module in _outermost(modules)
        for name, parameter in held_parameters(module)
        if parameter.requires_grad and parameter.grad is not None and id(parameter) not in held
    ]


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
