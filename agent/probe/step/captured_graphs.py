"""Which CUDA graphs contain backwards, and steps of which optimizers."""

import weakref
from collections.abc import Callable, Hashable, Sequence

from torch.optim import Optimizer

_Reference = Callable[[], Optimizer | None]


class CapturedGraphs:
    """Remembers the optimizers whose steps were recorded into each graph; keeps neither alive."""

    def __init__(self) -> None:
        self._capturing: weakref.ref[Hashable] | None = None
        self._stepping: weakref.WeakKeyDictionary[Hashable, list[_Reference]] = (
            weakref.WeakKeyDictionary()
        )

        self._backwards: weakref.WeakSet[Hashable] = weakref.WeakSet()

    def begin(self, graph: Hashable) -> None:
        """Begin to record into `graph`, which so far contains nothing."""
        self._capturing = weakref.ref(graph)
        self._stepping[graph] = []
        self._backwards.discard(graph)

    def end(self) -> None:
        """End the recording."""
        self._capturing = None

    def note_backward(self) -> None:
        """Note a backward during a capture."""
        if self._capturing is not None and (graph := self._capturing()) is not None:
            self._backwards.add(graph)

    def goes_backward(self, graph: Hashable) -> bool:
        """Return whether a replay of `graph` makes gradients."""
        return graph in self._backwards

    def note_step(self, optimizer: object) -> bool:
        """Note a step of an optimizer during a capture; return whether it is known of which."""
        graph = None if self._capturing is None else self._capturing()
        if graph is None or not isinstance(optimizer, Optimizer):
            return False
        self._stepping[graph].append(weakref.ref(optimizer))
        return True

    def steps_of(self, graph: Hashable) -> Sequence[Optimizer] | None:
        """Return the optimizers that step when `graph` is replayed, once for each step.

        None for a graph whose capture was not seen.
        """
        references = self._stepping.get(graph)
        if references is None:
            return None
        return [optimizer for each in references if (optimizer := each()) is not None]
