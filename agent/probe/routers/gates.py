"""The routers of a module tree: those whose class is known, and those that a setting names."""

import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from mp_agent.probe.activations.modules import is_compiled
from mp_agent.probe.optimizers.lookup.parameter_names import strip_wrappers
from mp_agent.probe.routers.routing import Read, read_deepspeed, read_switch, read_top_k

COMPILED = "routers of compiled modules"

_NAME_OF_CLASS = re.compile(r"(Router|Gate|Gating)$")
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Attributes with the number of experts."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A router: its unique name without wrapper prefixes, how it is read, and who named it."""

    name: str
    module: "weakref.ref[nn.Module]"
    read: Read
    pattern: str = ""
    """The one of the setting; empty for a class that is known."""


class Gates:
    """The routers of a tree, in the order of the tree. Keeps none alive.

    patterns: of names of other modules, each with the number of experts that it chooses for a
    token. not_covered: what the tree contains besides, and the patterns that fit no module.
    """

    def __init__(self, root: nn.Module, patterns: Mapping[str, int]) -> None:
        self._root = weakref.ref(root)
        self._patterns = patterns
        self._fitting: set[str] = set()
        self._compiled = False
        self.gates = tuple(self._found(root))
        self.names = tuple(gate.name for gate in self.gates)
        missing = [pattern for pattern in patterns if pattern not in self._fitting]
        self.not_covered = (
            *((COMPILED,) if self._compiled else ()),
            *(f"routers={pattern}: there is no such module" for pattern in missing),
        )

    def is_of(self, root: nn.Module) -> bool:
        """Return whether they were found in the tree of `root`."""
        return self._root() is root

    def _found(self, root: nn.Module) -> Iterator[Gate]:
        taken: set[str] = set()
        seen: set[int] = set()
        waiting: list[tuple[str, nn.Module, bool]] = [("", root, False)]
        while waiting:
            path, module, compiled = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            compiled = compiled or is_compiled(module)
            children = [(key, each) for key, each in module._modules.items() if each is not None]
            for key, child in reversed(children):
                waiting.append((f"{path}.{key}" if path else key, child, compiled))
            name = strip_wrappers(path) or type(module).__name__
            found = self._read_of(module, name)
            if found is None:
                continue
            if compiled or isinstance(module, torch.jit.ScriptModule):
                self._compiled = True
                continue
            while name in taken:
                name = f"{name}'"
            taken.add(name)
            yield Gate(name, weakref.ref(module), *found)

    def _read_of(self, module: nn.Module, name: str) -> tuple[Read, str] | None:
        fitting = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        self._fitting.update(fitting)
        known = read_of_class(module)
        if known is not None:
            return known, ""
        if fitting:
            return read_top_k(self._patterns[fitting[0]], ()), fitting[0]
        return None


def read_of_class(module: nn.Module) -> Read | None:
    """Return how a module is read whose class is known to be a router; None for any other."""
    kind = type(module)
    if kind.__name__ == "TopKGate" and kind.__module__.partition(".")[0] == "deepspeed":
        return read_deepspeed
    if kind.__name__ == "SwitchTransformersTop1Router":
        return read_switch
    if not _NAME_OF_CLASS.search(kind.__name__):
        return None
    top_k = getattr(module, "top_k", None)
    found = (getattr(module, name, None) for name in _COUNTS)
    counts = [count for count in found if isinstance(count, int) and count > 0]
    if not isinstance(top_k, int) or top_k < 1 or not counts:
        return None
    return read_top_k(top_k, counts)
