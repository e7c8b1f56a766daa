"""A hook on a tensor that reports its gradient."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from mp_agent.probe.activations.forward_hook import Run

K = TypeVar("K")


class GradientHook(Generic[K]):
    """Reports the gradient of a tensor under a key, unless compiled autograd traces it."""

    __slots__ = ("_add", "_key", "_run", "_what")
    __torch_unserializable__ = True
    """Torch leaves it out, without a warning, where the tensor is saved."""

    def __init__(self, run: Run, what: str, add: Callable[[K, object], None], key: K) -> None:
        """add: gets the key and the gradient. what: a kind of failure."""
        self._run, self._what, self._add, self._key = run, what, add, key

    def __call__(self, gradient: object) -> None:
        """Report the gradient."""
        if not torch.compiler.is_compiling():
            self._run(self._what, self._add, self._key, gradient)
