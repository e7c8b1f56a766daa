"""Finds where in a backward pass the first gradient arose that is not finite."""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from math import nan

import torch
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.activations.forward_hook import Run
from mp_agent.probe.activations.gradient_hook import GradientHook
from mp_agent.probe.activations.parts import local_tensors, tensors_in
from mp_agent.probe.activations.statistics import all_finite, measurable

_TENSORS_AT_MOST = 16
"""Inputs, and outputs, of one call that are watched."""
_LOOK_FOR_FREED = 4096
"""Tensors after which those are looked for that no backward pass can reach any more."""


@dataclass(slots=True)
class _Watched:
    """A tensor between modules: which of them returned it, and which had it as an input."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    handle: RemovableHandle
    makers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


class OutputGradients:
    """Watches the gradients of tensors that modules got and returned, in the backward after it.

    A gradient that is not finite, where all before it in the backward pass were, arose in the
    module that has its tensor as an input; in a function or the loss, if no module has.
    """

    def __init__(self, run: Run) -> None:
        self.streams: set[Hashable] = set()
        """Streams of the device on which gradients were looked at."""
        self._run = run
        self._watched: dict[int, _Watched] = {}
        """By a number that is never given again."""
        self._numbers = count()
        self._look_for_freed = _LOOK_FOR_FREED
        self._newest: dict[int, _Watched] = {}
        """By `id` of the tensor."""
        self._arrived: list[tuple[_Watched, torch.Tensor]] = []
        """In the order of backward; each with a 0-dim bool, whether it is all finite."""

    def begin(self) -> None:
        """Forget what was watched before."""
        self.end()
        self._watched, self._newest, self._arrived, self.streams = {}, {}, [], set()
        self._look_for_freed = _LOOK_FOR_FREED

    def end(self) -> None:
        """Remove the hooks."""
        for watched in self._watched.values():
            watched.handle.remove()

    def watch(self, place: int, inputs: object, output: object) -> None:
        """Put hooks on what module `place` got and returned, unless they have one already."""
        made = list(islice(_with_gradient(output), _TENSORS_AT_MOST))
        if not made or _backward_is_compiled():
            return
        for tensor in islice(_with_gradient(inputs), _TENSORS_AT_MOST):
            in_place = any(tensor is each for each in made)
            known = self._known(tensor)
            if in_place and (known is None or known.version == tensor._version):
                continue  # its gradient before the change is out of reach, or it was not changed
            if known is None or (known.version != tensor._version and not in_place):
                known = self._hook(tensor)
            known.readers.append(place)
        for tensor in made:
            known = self._known(tensor)
            if known is None or known.version != tensor._version:
                known = self._hook(tensor)
            known.makers.append(place)

    def take(self, modules: int) -> torch.Tensor | None:
        """Remove the hooks; return float64 [M, 2], None if no gradient was seen.

        Columns `nonfinite_gradient_call` and `nonfinite_backward_call` of `ACTIVATIONS`.
        """
        self.end()
        arrived, self._arrived = self._arrived, []
        self._watched, self._newest = {}, {}
        if not arrived:
            return None
        flags = [finite for _, finite in arrived]
        device = accelerator.common_device(flags)
        if not accelerator.is_on_host(device):
            for stream in self.streams - {accelerator.current_stream(device)}:
                accelerator.wait_for_stream(device, stream)
        nonfinite_K = torch.stack(accelerator.on_one_device(flags)).logical_not()
        numbers_K = torch.arange(len(arrived), dtype=torch.float64, device=device)
        is_first_K = nonfinite_K & (nonfinite_K.cumsum(0) == 1)
        first_K = numbers_K.masked_fill(~is_first_K, nan).unbind()
        absent = torch.full((), nan, dtype=torch.float64, device=device)
        table = [[absent, absent] for _ in range(modules)]
        for (watched, _), first in zip(arrived, first_K, strict=True):
            for place in watched.makers:
                table[place][0] = torch.fmin(table[place][0], first)
            for place in set(watched.readers):
                table[place][1] = torch.fmin(table[place][1], first)
        return torch.stack([torch.stack(row) for row in table])

    def _known(self, tensor: torch.Tensor) -> _Watched | None:
        found = self._newest.get(id(tensor))
        return found if found is not None and found.tensor() is tensor else None

    def _hook(self, tensor: torch.Tensor) -> _Watched:
        if len(self._watched) >= self._look_for_freed:
            self._forget_freed()
        number = next(self._numbers)
        hook = GradientHook(self._run, "gradients of outputs", self._add, number)
        register: Callable[[object], RemovableHandle] = tensor.register_hook
        watched = _Watched(weakref.ref(tensor), tensor._version, register(hook))
        self._watched[number] = self._newest[id(tensor)] = watched
        return watched

    def _forget_freed(self) -> None:
        """Forget tensors whose graph is gone: of a forward pass that no backward has followed."""
        self._watched = {
            number: watched
            for number, watched in self._watched.items()
            if watched.handle.hooks_dict_ref() is not None
        }
        self._newest = {
            key: watched for key, watched in self._newest.items() if watched.tensor() is not None
        }
        self._look_for_freed = max(_LOOK_FOR_FREED, 2 * len(self._watched))

    def _add(self, number: int, gradient: object) -> None:
        if (watched := self._watched.get(number)) is None:
            return  # of a backward after the one that was watched
        for part in local_tensors(tensors_in(gradient)):
            if accelerator.is_supported(part.device) and measurable(part):
                if not accelerator.is_on_host(part.device):
                    self.streams.add(accelerator.current_stream(part.device))
                self._arrived.append((watched, all_finite(part)))


def _with_gradient(parts: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that autograd made: a hook on a leaf would stay on the script's tensor."""
    for tensor in tensors_in(parts):
        if tensor.requires_grad and tensor.grad_fn is not None:
            yield tensor


def _backward_is_compiled() -> bool:
    """Return whether `torch.compile` will trace backward: each hook would compile it again."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
