"""The linear layers of a module tree, and those that Transformer Engine scales."""

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from mp_agent.probe.activations.modules import is_compiled
from mp_agent.probe.fp8.delayed_scaling import has_delayed_scaling
from mp_agent.probe.optimizers.lookup.parameter_names import strip_wrappers

COMPILED = "FP8 operands of compiled modules"


class Fp8Layers:
    """The layers of a tree that FP8 may multiply, under unique names. Keeps none alive.

    Those are `nn.Linear` with its subclasses, torchao's `Float8Linear` among them, and modules
    with delayed scaling. names: [M], in the order of the tree. not_covered: what it has besides.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        found = list(_found(root))
        self.names = tuple(name for name, _, compiled in found if not compiled)
        self.not_covered = (COMPILED,) if any(compiled for *_, compiled in found) else ()
        self._modules = tuple(weakref.ref(module) for _, module, compiled in found if not compiled)

    def is_of(self, root: nn.Module) -> bool:
        """Return whether they were found in the tree of `root`."""
        return self._root() is root

    def module(self, place: int) -> nn.Module | None:
        """Return the module at a place among the names; None if it no longer exists."""
        return self._modules[place]()

    @property
    def alive(self) -> Iterator[tuple[int, nn.Module]]:
        """The modules that still exist, with their places among the names."""
        for place, reference in enumerate(self._modules):
            if (module := reference()) is not None:
                yield place, module


def fp8_library(root: nn.Module | None) -> str:
    """Return which library casts layers of a model to FP8; "" for none, joined for several."""
    modules = [] if root is None else list(root.modules())
    found = {
        "torchao": any(map(_is_torchao, modules)),
        "transformer_engine": any(map(has_delayed_scaling, modules)),
    }
    return "+".join(name for name, there in found.items() if there)


def _is_torchao(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Float8Linear" and kind.__module__.partition(".")[0] == "torchao"


def _found(root: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield a unique name without wrapper prefixes, the module, and whether hooks never run."""
    taken: set[str] = set()
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module, bool]] = [("", root, False)]
    while waiting:
        path, module, compiled = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        compiled = compiled or is_compiled(module) or isinstance(module, torch.jit.ScriptModule)
        children = [(key, each) for key, each in module._modules.items() if each is not None]
        for key, child in reversed(children):
            waiting.append((f"{path}.{key}" if path else key, child, compiled))
        if not isinstance(module, nn.Linear) and not has_delayed_scaling(module):
            continue
        name = strip_wrappers(path) or type(module).__name__
        while name in taken:
            name = f"{name}'"
        taken.add(name)
        yield name, module, compiled
