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


def sources_of(
    parameters: Sequence[torch.Tensor], modules: Sequence[nn.Module]
) -> list[nn.Parameter]:
    """Return the model's parameters that an optimizer's own tensors stand for; [] for none.

    parameters: of the optimizer, none of which a module holds. Those are it that have gradients and
    together as many elements, in one module tree. They are paired if their shapes are the same in
    this order; else the optimizer's tensors are flat.
    """
    elements = sum(parameter.numel() for parameter in parameters)
    for module in _outermost(modules):
        found = [each for _, each in held_parameters(module) if each.requires_grad]
        if sum(each.numel() for each in found) == elements and any(map(_has_gradient, found)):
            return found
    return []


def computing_dtype(modules: Sequence[nn.Module]) -> torch.dtype | None:
    """Return the dtype of most elements that get gradients in modules; None without any."""
    elements: Counter[torch.dtype] = Counter()
    for module in _outermost(modules):
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
