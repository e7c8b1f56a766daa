"""Lets a module compute in another way for a while, such that its copies compute as before."""

import copyreg
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

Compute: TypeAlias = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Gets the module, how it computes by itself, and its arguments."""


def switched(module: nn.Module, compute: Compute) -> Callable[[], None]:
    """Have calls of `module` made by `compute`; return what undoes it.

    The module becomes one of a class of its own, as in FSDP2. Copies and pickled ones, such as an
    average of the weights or a checkpoint, are of the plain class: a function in place of `forward`
    would be copied with them, and compute with the weights of the module that it was made for.
    """
    plain = type(module)

    class Switched(plain):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            def by_itself(*own_args: Any, **own_kwargs: Any) -> Any:
                return plain.__call__(self, *own_args, **own_kwargs)

            return compute(self, by_itself, args, kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            object.__setattr__(self, "__class__", plain)
            try:
                reduced = self.__reduce_ex__(protocol)
            finally:
                object.__setattr__(self, "__class__", Switched)
            # Pickle lets this function make an object of the present class alone.
            if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
                return plain.__new__, *reduced[1:]
            return reduced

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Switched, name, getattr(plain, name))

    def undo() -> None:
        if type(module) is Switched:
            object.__setattr__(module, "__class__", plain)

    object.__setattr__(module, "__class__", Switched)
    return undo
