"""The modules whose outputs are measured: the leaves of a module tree that runs uncompiled."""

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from mp_agent.probe.optimizers.lookup.parameter_names import strip_wrappers

COMPILED = "activations of compiled modules"
SCRIPTED = "activations of scripted modules"

_WHOLE = (nn.MultiheadAttention,)
"""Modules that use the weights of their children without calling them."""


class OutputModules:
    """The leaf modules of a tree, under unique names without wrapper prefixes. Keeps none alive.

    names: [M], in the order of the tree. not_covered: what the tree contains besides.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        found = _Leaves()
        found.visit(root, "")
        self.names = tuple(_unique(found.names))
        self.not_covered = tuple(sorted(found.not_covered))
        self._modules = tuple(map(weakref.ref, found.modules))

    def is_of(self, root: nn.Module) -> bool:
        """Return whether they were found in the tree of `root`."""
        return self._root() is root

    @property
    def alive(self) -> Iterator[tuple[int, nn.Module]]:
        """The modules that still exist, with their places among the names."""
        for place, reference in enumerate(self._modules):
            if (module := reference()) is not None:
                yield place, module


class _Leaves:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.modules: list[nn.Module] = []
        self.not_covered: set[str] = set()
        self._seen: set[int] = set()

    def visit(self, module: nn.Module, name: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if is_compiled(module):
            self.not_covered.add(COMPILED)
        elif isinstance(module, torch.jit.ScriptModule):
            self.not_covered.add(SCRIPTED)
        else:
            children = [(key, each) for key, each in module._modules.items() if each is not None]
            if not children or isinstance(module, _WHOLE):
                self.names.append(strip_wrappers(name) or type(module).__name__)
                self.modules.append(module)
                return
            for key, child in children:
                self.visit(child, f"{name}.{key}" if name else key)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` runs a module, so that hooks within it never run."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return type(module).__module__ == "torch._dynamo.eval_frame"


def _unique(names: list[str]) -> Iterator[str]:
    taken: set[str] = set()
    for name in names:
        while name in taken:
            name = f"{name}'"
        taken.add(name)
        yield name
