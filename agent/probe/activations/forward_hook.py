"""A forward hook that reports the calls of a module."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

Run = Callable[..., None]
"""`Guard.run`: a kind of failure, a function, and its arguments."""


class ForwardHook:
    """A forward hook; a copy of the module, pickled or deep, has one that does nothing instead."""

    __slots__ = ("_add", "_place", "_run", "_what")

    def __init__(
        self, run: Run, what: str, add: Callable[[int, object, object], None], place: int
    ) -> None:
        """add: gets the place, the positional inputs and the output. what: a kind of failure."""
        self._run, self._what, self._add, self._place = run, what, add, place

    def __call__(self, module: object, inputs: object, output: object) -> None:
        """Report a call, unless it is traced."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return
        self._run(self._what, self._add, self._place, inputs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library alone: what is saved must load where mp_agent is not installed.
        return getattr, (nullcontext(), "__exit__")
