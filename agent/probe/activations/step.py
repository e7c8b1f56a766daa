"""Decides whose outputs are measured, and adds them to the step under way."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from mp_agent.probe import accelerator
from mp_agent.probe.activations.modules import OutputModules
from mp_agent.probe.activations.sampling import NEVER_CALLED, ActivationSampling
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import ACTIVATIONS

_NONE: Mapping[str, tuple[str, ...]] = {}


class StepActivations:
    """The outputs of the modules of the run's model, in the first forward pass of sampled steps.

    Of their gradients, in the backward pass that follows, where the first arose that is not finite.
    """

    def __init__(
        self, sampling: ActivationSampling, note_unsupported: Callable[[str], None]
    ) -> None:
        self._sampling = sampling
        self._note_unsupported = note_unsupported
        self._modules: OutputModules | None = None
        self._layers = _NONE

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the modules, by family; the same object while they are the same."""
        if model is not None and (self._modules is None or not self._modules.is_of(model)):
            self._look_at(model)
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Put hooks on the modules for the next forward pass."""
        if model is not None:
            modules = self._look_at(model)  # scripts add, wrap and replace modules
            if modules.names:
                self._sampling.begin(modules)

    def end(self, step: OpenStep) -> None:
        """Remove the hooks, and add what was measured to the step."""
        if not self._sampling.begun:
            return
        rows_MC = self._sampling.take()
        if rows_MC is None:
            self._note_unsupported(NEVER_CALLED)
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
