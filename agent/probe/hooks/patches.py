"""Replaces functions of other packages, and restores them."""

import sys
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from mp_agent.probe.isolation import Shield

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def untraced(function: F) -> F:
    """Return `function` such that torch.compile does not trace it, though it may what it calls.

    For what torch.compile does not trace anyway: our layer above it must not add a graph break.
    `function` must not carry attributes of another untraced one (`functools.wraps` copies them).
    """
    disable: Callable[..., F] = torch.compiler.disable
    return disable(function, recursive=False)


class Patches:
    """What has been replaced so far, and how to restore each of it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._awaited: dict[tuple[str, str], Callable[[type], None]] = {}
        """Wrappers of classes that are yet to be imported, by module and name."""

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Have `undo` called by `restore`."""
        self._undo.append(undo)

    def replace(self, owner: type | ModuleType, name: str, wrap: Wrapper) -> None:
        """Replace the function `owner.name` by `wrap(function)`."""
        original = vars(owner)[name]
        replacement = wrap(original)
        setattr(owner, name, replacement)

        def undo() -> None:
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)

        self.on_restore(undo)

    def put(self, owner: type, name: str, value: object) -> None:
        """Give `owner` its own attribute, whether or not it has one of that name."""
        before = vars(owner).get(name)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self.on_restore(undo)

    def on_new_subclass(self, owner: type[T], announce: Callable[[type[T]], None]) -> None:
        """Have `announce` called with each class that is derived from `owner` from now on."""
        earlier = vars(owner).get("__init_subclass__")

        def made(cls: type[T], /, **kwargs: Any) -> None:
            if earlier is not None:
                earlier.__get__(None, cls)(**kwargs)
            else:
                super(owner, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
            announce(cls)

        self.put(owner, "__init_subclass__", classmethod(made))

    def once_imported(
        self, module: str, name: str, wrap: Callable[[type], None], shield: Shield
    ) -> None:
        """Have `wrap` called with the class `module.name` once the program has imported it.

        Nothing is imported here: it is looked for now, whenever a module class is defined, and at
        each backward until it is found.
        """
        if not self._awaited:
            self.on_new_subclass(nn.Module, lambda _: shield.run("imports", self.wrap_imported))
        self._awaited[module, name] = wrap
        self.wrap_imported()

    def wrap_imported(self) -> None:
        """Wrap the awaited classes that exist by now."""
        for module, name in tuple(self._awaited):
            owner = vars(sys.modules.get(module, object)).get(name)
            if isinstance(owner, type):
                self._awaited.pop((module, name))(owner)

    def replace_inside(self, decorated: Callable[..., Any], wrap: Wrapper) -> bool:
        """Replace the function that a decorator's closure holds, wherever `decorated` is known.

        Reaches callers who imported `decorated` earlier. Returns False when there is no such cell.
        """
        cell = _function_cell(decorated)
        if cell is None:
            return False
        original = cell.cell_contents
        replacement = wrap(original)
        cell.cell_contents = replacement

        def undo() -> None:
            if cell.cell_contents is replacement:
                cell.cell_contents = original

        self.on_restore(undo)
        return True

    def restore(self) -> None:
        """Restore everything, except what other code has replaced again since."""
        while self._undo:
            self._undo.pop()()


def _function_cell(decorated: Callable[..., Any]) -> CellType | None:
    for cell in getattr(decorated, "__closure__", None) or ():
        if isinstance(cell, CellType) and isinstance(cell.cell_contents, FunctionType):
            return cell
    return None
