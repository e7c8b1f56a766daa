"""Where a rank's own gradients are found before they are reduced, and the hooks that see them."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.plan import MeasurementPlan, lies_like


class GradientSource:
    """The tensor that autograd adds the gradient of one parameter to. Keeps nothing alive."""

    __slots__ = ("_copied_from", "_tensor")

    def __init__(self, tensor: torch.Tensor | None, copied_from: Any = None) -> None:
        """copied_from: the `FSDPParam` whose whole, gathered parameter `tensor` is.

        FSDP2 makes that tensor at the first all-gather, and frees and fills its storage from then
        on; None before.
        """
        self._tensor = None if tensor is None else TensorRef(tensor)
        self._copied_from = None if copied_from is None else weakref.ref(copied_from)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None where there is none, yet or any more."""
        return None if self._tensor is None else self._tensor()

    @property
    def trained(self) -> bool:
        """Whether autograd adds to its gradient."""
        tensor = self.tensor
        return tensor is not None and tensor.requires_grad and tensor.is_leaf

    @property
    def is_current(self) -> bool:
        """Whether the wrapper still computes with this tensor."""
        if self._copied_from is None:
            return self.tensor is not None
        return self.tensor is getattr(self._copied_from(), "_unsharded_param", None)

    @property
    def was_taken(self) -> bool:
        """Whether FSDP2 has taken the gradient away, to reduce it."""
        return self._copied_from is not None and not self._addends()

    def gradient(self) -> torch.Tensor | None:
        """Return the rank's gradient, as far as it is there; its local part if it is a DTensor.

        Of micro-batches that are reduced in another dtype than they are computed in, FSDP2 keeps
        the sum apart. Raises ValueError where autograd left a gradient partial.
        """
        locals_of = [self._local(each) for each in self._addends()]
        if len(locals_of) == 2:
            return locals_of[0] + locals_of[1]
        return locals_of[0] if locals_of else None

    def _addends(self) -> list[torch.Tensor]:
        gradient = getattr(self.tensor, "grad", None)
        kept = getattr(self._copied_from(), _KEPT_SUM, None) if self._copied_from else None
        # From torch 2.15 on, the sum is the gradient itself.
        found = [gradient] if kept is gradient else [kept, gradient]
        return [each for each in found if each is not None]

    def _local(self, gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, DTensor):
            return gradient
        tensor = self.tensor
        if tensor is None or not lies_like(gradient, tensor):
            raise ValueError("the gradient has a partial placement")
        return gradient.to_local()


_KEPT_SUM = "unsharded_accumulated_grad"


def sources_of(plan: MeasurementPlan) -> list[GradientSource] | None:
    """Return the source of each parameter of a plan; None where they are not known.

    That is so of flat parameters, of parameters that are offloaded to another device than that on
    which they are used, and of a release of torch in which FSDP2 has another structure.
    """
    if any(slot.part is not None for slot in plan.slots):
        return None
    parameters = [slot.parameter for slot in plan.slots]
    sharding = plan.reducers.sharding
    if not sharding:
        return [GradientSource(parameter) for parameter in parameters]
    copied = {id(each.sharded_param): each for each in _fsdp_params(sharding)}
    return _sources_under_fsdp(parameters, copied, plan.device)


def _sources_under_fsdp(
    parameters: Iterable[torch.Tensor], copied: Mapping[int, Any], device: torch.device
) -> list[GradientSource] | None:
    found: list[GradientSource] = []
    for parameter in parameters:
        fsdp_param = copied.get(id(parameter))
        if fsdp_param is None and not isinstance(parameter, DTensor):
            found.append(GradientSource(parameter))  # one of `ignored_params`
            continue
        if not all(hasattr(fsdp_param, name) for name in (_KEPT_SUM, "__weakref__")):
            return None
        tensor = getattr(fsdp_param, "_unsharded_param", None)
        if tensor is not None and tensor.device != device:
            return None
        found.append(GradientSource(tensor, fsdp_param))
    return found


def _fsdp_params(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield the `FSDPParam` of each parameter, as far as FSDP2's internals show them."""
    for module in modules:
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)  # not in earlier releases
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for fsdp_param in getattr(group, "fsdp_params", ()):
                if hasattr(fsdp_param, "sharded_param"):
                    yield fsdp_param


Run = Callable[..., None]
"""`Shield.run`: a kind of failure, a function, and its arguments."""

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
