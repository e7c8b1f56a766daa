"""Hooks that see a gradient once backward has added to it, before it is reduced over the ranks."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from mp_agent.probe.local_gradients.sources import GradientSource

Run = Callable[..., None]
"""`Guard.run`: a kind of failure, a function, and its arguments."""

_KIND = "local gradients"


class _GradientHook:
    """A post-accumulate hook; a copy of the parameter, pickled or deep, does not have it.

    Where compiled autograd traces it, it leaves nothing in the graph, and is not called.
    """

    __slots__ = ("_note", "_place")

    def __init__(self, note: Callable[[int], None], place: int) -> None:
        self._note, self._place = note, place

    def __call__(self, parameter: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._note(self._place)


class LocalGradientHooks:
    """Calls `measure` with the places of parameters while their gradients are the rank's own.

    Autograd runs a post-accumulate hook within the node that adds to a gradient, and the hooks by
    which DistributedDataParallel reduces it after that node. Where it brings the reduced gradients
    into the place of the others only as backward ends, all are measured together, by a callback of
    autograd that is queued before DDP's own: so it is for every backward within a backward
    (reentrant checkpointing), one of which may end with DDP's callback. Elsewhere each is measured
    by itself, in its hook: FSDP2 takes the gradients of a module away as soon as it has them all.
    """

    def __init__(self, run: Run, measure: Callable[[Collection[int]], None]) -> None:
        """measure: takes places in the sequence that was given to `watch`."""
        self._run = run
        self._measure = measure
        self._handles: list[RemovableHandle] = []
        self._trained: list[bool] = []
        self._wanted = self._together = False
        self._made: set[int] = set()
        """Places of which a gradient was made, and is yet to be measured."""
        self._queued: set[int] = set()
        """Backwards, by autograd's own numbers, at the end of which they are measured."""

    def watch(self, sources: Sequence[GradientSource], *, new: bool) -> None:
        """Have one hook on each tensor that is trained. new: they are not those of before."""
        trained = [source.trained for source in sources]
        if not new and trained == self._trained:
            return
        self.close()
        self._trained = trained
        for place, source in enumerate(sources):
            tensor = source.tensor
            if tensor is not None and trained[place]:
                register: Callable[..., RemovableHandle] = tensor.register_post_accumulate_grad_hook
                self._handles.append(register(_GradientHook(self._note, place)))

    def backward_begins(self, *, wanted: bool, together: bool) -> None:
        """Begin an outermost backward.

        wanted: whether its gradients are to be measured. together: whether they stay the rank's
        own until it ends.
        """
        self._wanted, self._together = wanted, together
        self._made.clear()
        self._queued.clear()

    def close(self) -> None:
        """Remove the hooks."""
        handles, self._handles, self._trained = self._handles, [], []
        for handle in handles:
            handle.remove()

    def _note(self, place: int) -> None:
        """Measure the gradient of a parameter, or see to it that it is measured."""
        if not self._wanted:
            return
        if not self._together:
            self._run(_KIND, self._measure, (place,))
            return
        self._made.add(place)
        backward = torch._C._current_graph_task_id()
        if backward not in self._queued:
            self._queued.add(backward)
            self._run(_KIND, self._queue, backward)

    def _queue(self, backward: int) -> None:
        ended = partial(self._run, _KIND, self._backward_ended, backward)
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _backward_ended(self, backward: int) -> None:
        self._queued.discard(backward)
        made = frozenset(self._made)
        self._made.clear()
        if made:
            self._measure(made)
