"""Hooks linear layers for one forward pass and the backward pass after it."""

from collections.abc import Callable, Hashable
from math import nan

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.activations.forward_hook import ForwardHook, Run
from mp_agent.probe.activations.gradient_hook import GradientHook
from mp_agent.probe.fp8.delayed_scaling import (
    backward_row,
    backward_scale,
    forward_row,
    has_delayed_scaling,
)
from mp_agent.probe.fp8.layers import Fp8Layers
from mp_agent.probe.fp8.operands import Operand, operand_row, usable
from mp_agent.probe.statistics.folding import folded, keep_row
from mp_agent.records.columns import FP8


class Fp8Sampling:
    """Measures operands of layers from `begin` to `take`.

    Inputs and weights are measured in the forward pass, until `forward_ended`; gradients of the
    outputs of that pass in its backward pass. What runs while `is_training` says no, such as an
    evaluation, is left out.
    """

    def __init__(self, run: Run, is_training: Callable[[], bool]) -> None:
        self.streams: set[Hashable] = set()
        """Streams of the device on which anything was measured."""
        self._run = run
        self._is_training = is_training
        self._handles: list[RemovableHandle] = []
        self._layers: Fp8Layers | None = None
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._scales: dict[int, torch.Tensor] = {}
        """Of gradients, by place: those with which the backward pass casts."""
        self._sample = 0

    def begin(self, layers: Fp8Layers) -> None:
        """Put hooks on the layers; what was measured before is forgotten."""
        self.close()
        self._layers = layers
        for place, module in layers.alive:
            hook = ForwardHook(self._run, "FP8 operands", self._add_call, place)
            # Before the hook with which FSDP2 takes the whole weight away again.
            self._handles.append(module.register_forward_hook(hook, prepend=True))

    def forward_ended(self) -> None:
        """Remove the hooks from the layers."""
        while self._handles:
            self._handles.pop().remove()

    def close(self) -> None:
        """Remove the hooks, and forget what was measured."""
        self.forward_ended()
        # Hooks of gradients go with the graph; those of an earlier sample measure nothing.
        self._sample += 1
        self._layers, self._rows, self._scales, self.streams = None, {}, {}, set()

    def take(self, *, one_pass: bool) -> torch.Tensor | None:
        """Return float64 [M, C], NaN for layers that were not called; None if none was.

        one_pass: whether no other backward pass has followed, so that the amax of gradients is
        that of the pass whose scales were kept.
        """
        for place, scale_N in self._scales.items() if one_pass else ():
            module = self._module(place)
            row = None if module is None else backward_row(module, scale_N)
            if row is not None:
                self._keep(place, row)
        rows, streams = self._rows, self.streams
        count = 0 if self._layers is None else len(self._layers.names)
        self.close()
        self.streams = streams
        if not rows:
            return None
        found = [folded(FP8, accelerator.on_one_device(each)) for each in rows.values()]
        one_each = dict(zip(rows, accelerator.on_one_device(found), strict=True))
        device = next(iter(one_each.values())).device
        absent = torch.full((len(FP8.names),), nan, dtype=torch.float64, device=device)
        return torch.stack([one_each.get(place, absent) for place in range(count)])

    def _add_call(self, place: int, inputs: object, output: object) -> None:
        module = self._module(place)
        if module is None or not self._is_training():
            return
        if has_delayed_scaling(module):
            row, scale_N = forward_row(module), backward_scale(module)
            if row is not None:
                self._keep(place, row)
            if scale_N is not None:
                self._scales[place] = scale_N
            return
        if isinstance(inputs, tuple) and inputs:
            self._add(place, "input", inputs[0])
        self._add(place, "weight", module._parameters.get("weight"))
        if isinstance(output, torch.Tensor) and output.requires_grad:
            key = self._sample, place
            hook = GradientHook(self._run, "FP8 operands", self._add_gradient, key)
            register: Callable[[object], RemovableHandle] = output.register_hook
            register(hook)

    def _module(self, place: int) -> nn.Module | None:
        return None if self._layers is None else self._layers.module(place)

    def _add_gradient(self, key: tuple[int, int], gradient: object) -> None:
        sample, place = key
        if sample == self._sample:
            self._add(place, "gradient", gradient)

    def _add(self, place: int, operand: Operand, value: object) -> None:
        tensor = usable(value)
        if tensor is not None:
            self._keep(place, operand_row(tensor, operand))

    def _keep(self, place: int, row: torch.Tensor) -> None:
        keep_row(FP8, self._rows.setdefault(place, []), row)
        if not accelerator.is_on_host(row.device):
            self.streams.add(accelerator.current_stream(row.device))
