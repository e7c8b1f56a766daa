"""Hooks modules for one forward pass, and collects a row of statistics of each output."""

from collections.abc import Callable, Hashable
from itertools import islice
from math import nan

import torch
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.activations.forward_hook import ForwardHook, Run
from mp_agent.probe.activations.modules import OutputModules
from mp_agent.probe.activations.output_gradients import OutputGradients
from mp_agent.probe.activations.parts import local_tensors, tensors_in
from mp_agent.probe.activations.statistics import measurable, output_row
from mp_agent.probe.statistics.folding import folded, keep_row
from mp_agent.records.columns import ACTIVATIONS

NEVER_CALLED = "activations: no module's call was seen, as in a function that is compiled"

_TENSORS_AT_MOST = 16
"""Tensors of one output that are measured."""


class ActivationSampling:
    """Measures the outputs of modules between `begin` and `take`, in the forward pass.

    What runs while `is_training` says no, such as an evaluation, is left out. Hooks are on modules
    only in between: `torch.compile` sees none but when it compiles just then, and traces nothing
    of them.
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
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._calls = 0

    def begin(self, modules: OutputModules) -> None:
        """Put hooks on the modules; what was measured before is forgotten."""
        self.close()
        self.gradients.begin()
        self._rows, self._calls, self.streams = {}, 0, set()
        self._modules = len(modules.names)
        for place, module in modules.alive:
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
        if not self._is_training():
            return
        call, self._calls = self._calls, self._calls + 1
        for tensor in islice(local_tensors(tensors_in(output)), _TENSORS_AT_MOST):
            if accelerator.is_supported(tensor.device) and measurable(tensor):
                if not accelerator.is_on_host(tensor.device):
                    self.streams.add(accelerator.current_stream(tensor.device))
                row = output_row(tensor, call, self._near_overflow)
                keep_row(ACTIVATIONS, self._rows.setdefault(place, []), row)
        self.gradients.watch(place, inputs, output)
