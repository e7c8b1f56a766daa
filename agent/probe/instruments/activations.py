"""When outputs of modules and their gradients are measured, and their part of a step."""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from math import nan

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.activation_modules import (
    ForwardHook,
    GradientHook,
    OutputModules,
    Run,
    all_finite,
    local_tensors,
    measurable,
    output_row,
    tensors_in,
)
from mp_agent.probe.instruments.instrument import Instrument
from mp_agent.probe.statistics.pieces import folded, keep_row
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import ACTIVATIONS

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
        """Watched tensors by a number that is never given again."""
        self._numbers = count()
        self._look_for_freed = _LOOK_FOR_FREED
        self._newest: dict[int, _Watched] = {}
        """Newest watched tensors by `id` of the tensor."""
        self._arrived: list[tuple[_Watched, torch.Tensor]] = []
        """Tensors in the order of backward; each with a 0-dim bool, whether it is all finite."""

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


NEVER_CALLED = (
    "activations: no call of the model's modules was seen, as in compiled functions and in "
    "functional copies"
)
NEVER_IN_TRAINING = "activations: modules were called in evaluation or without gradients alone"

_UNCALLED_STEPS = 3
"""Sampled steps in a row without a call after which it is said that there is none."""


class ActivationSampling:
    """Measures the outputs of modules between `begin` and `take`, in the forward pass.

    What runs while `is_training` says no, such as an evaluation, is left out, and so are calls of a
    module in another mode than that of the step before. Hooks are on modules only in between:
    `torch.compile` sees none but when it compiles just then, and traces nothing of them.

    called: whether any call was measured since `begin`. left_out: whether any was left out.
    """

    def __init__(self, run: Run, is_training: Callable[[], bool], near_overflow: float) -> None:
        self.streams: set[Hashable] = set()
        """Streams of the device on which outputs of the pass were measured."""
        self.gradients = OutputGradients(run)
        """Looks at gradients of the outputs in the backward pass that follows."""
        self._run = run
        self._is_training = is_training
        self._near_overflow = near_overflow
        self._handles: list[RemovableHandle] = []
        self._modules = 0
        self._modes: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        """By place, a module, and whether it was in training mode at `begin`."""
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._calls = 0
        self.left_out = False

    def begin(self, modules: OutputModules) -> None:
        """Put hooks on the modules; what was measured before is forgotten."""
        self.close()
        self.gradients.begin()
        self._rows, self._calls, self.streams = {}, 0, set()
        self._modes, self.left_out = {}, False
        self._modules = len(modules.names)
        for place, module in modules.alive:
            self._modes[place] = weakref.ref(module), module.training
            hook = ForwardHook(self._run, "activations", self._add, place)
            self._handles.append(module.register_forward_hook(hook))

    def end(self) -> None:
        """Remove the hooks of the forward pass."""
        while self._handles:
            self._handles.pop().remove()

    def close(self) -> None:
        """Remove all hooks."""
        self.end()
        self.gradients.end()

    @property
    def begun(self) -> bool:
        """Whether modules are hooked."""
        return bool(self._handles)

    @property
    def called(self) -> bool:
        """Whether any call was measured."""
        return self._calls > 0

    def take(self) -> torch.Tensor | None:
        """Remove the hooks; return float64 [M, C], NaN for modules that were not called.

        None when no output was measured.
        """
        self.end()
        rows, self._rows = self._rows, {}
        if not rows:
            return None
        found = [folded(ACTIVATIONS, accelerator.on_one_device(each)) for each in rows.values()]
        one_each = dict(zip(rows, accelerator.on_one_device(found), strict=True))
        device = next(iter(one_each.values())).device
        absent = torch.full((len(ACTIVATIONS.names),), nan, dtype=torch.float64, device=device)
        return torch.stack([one_each.get(place, absent) for place in range(self._modules)])

    def _add(self, place: int, inputs: object, output: object) -> None:
        if not self._is_training() or not self._is_in_same_mode(place):
            self.left_out = True
            return
        call, self._calls = self._calls, self._calls + 1
        for tensor in islice(local_tensors(tensors_in(output)), _TENSORS_AT_MOST):
            if accelerator.is_supported(tensor.device) and measurable(tensor):
                if not accelerator.is_on_host(tensor.device):
                    self.streams.add(accelerator.current_stream(tensor.device))
                row = output_row(tensor, call, self._near_overflow)
                keep_row(ACTIVATIONS, self._rows.setdefault(place, []), row)
        self.gradients.watch(place, inputs, output)

    def _is_in_same_mode(self, place: int) -> bool:
        """Return whether a module is in the mode in which it was at the end of the step before.

        Backward ends what counts as an evaluation, while attacks go on in evaluation mode.
        """
        reference, was_training = self._modes[place]
        module = reference()
        return module is None or module.training == was_training


_NONE: Mapping[str, tuple[str, ...]] = {}


class StepActivations(Instrument):
    """The outputs of the modules of the run's model, in the first forward pass of sampled steps.

    Of their gradients, in the backward pass that follows, where the first arose that is not finite.
    """

    subject = "activations"

    def __init__(
        self, sampling: ActivationSampling, note_unsupported: Callable[[str], None]
    ) -> None:
        self._sampling = sampling
        self._note_unsupported = note_unsupported
        self._modules: OutputModules | None = None
        self._layers = _NONE
        self._backward_came = False
        """Since the hooks were put on the modules."""
        self._uncalled_steps = 0

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the modules, by family; the same object while they are the same."""
        if model is not None and (self._modules is None or not self._modules.is_of(model)):
            self._look_at(model)
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Put hooks on the modules for the next forward pass."""
        self._backward_came = False
        if model is not None:
            modules = self._look_at(model)  # scripts add, wrap and replace modules
            if modules.names:
                self._sampling.begin(modules)

    def end(self, step: OpenStep) -> None:
        """Remove the hooks, and add what was measured to the step.

        Of a backward before any call, such as a discriminator's, both wait for the next one.
        """
        if not self._sampling.begun:
            return
        self._backward_came = True
        if not self._sampling.called:
            return
        self._uncalled_steps = 0
        rows_MC = self._sampling.take()
        if rows_MC is None:
            return
        step.own_rows[ACTIVATIONS.name] = rows_MC
        step.streams.update(self._sampling.streams)

    def backward_ended(self, step: OpenStep) -> None:
        """Add to the step where in backward the first gradient arose that is not finite."""
        rows_MC = step.own_rows.get(ACTIVATIONS.name)
        if rows_MC is None:
            return
        found_M2 = self._sampling.gradients.take(len(rows_MC))
        if found_M2 is not None:
            parts = accelerator.on_one_device((rows_MC[:, :-2], found_M2))
            step.own_rows[ACTIVATIONS.name] = torch.cat(parts, dim=1)
            step.streams.update(self._sampling.gradients.streams)

    def finish(self, step: OpenStep) -> None:
        """Remove hooks that no call has met; after some such steps in a row say that none does."""
        if not self._sampling.begun or not self._backward_came:
            return
        self._sampling.end()
        self._uncalled_steps += 1
        if self._uncalled_steps == _UNCALLED_STEPS:
            left_out = self._sampling.left_out
            self._note_unsupported(NEVER_IN_TRAINING if left_out else NEVER_CALLED)

    def close(self) -> None:
        """Remove the hooks."""
        self._sampling.close()

    def _look_at(self, model: nn.Module) -> OutputModules:
        modules = self._modules = OutputModules(model)
        for feature in modules.not_covered:
            self._note_unsupported(feature)
        names = {ACTIVATIONS.name: modules.names} if modules.names else _NONE
        self._layers = self._layers if names == self._layers else names
        return modules
