"""Decides which layers' operands are measured, and adds them to the step under way."""

from collections.abc import Callable, Mapping

from torch import nn

from mp_agent.probe.fp8.layers import Fp8Layers
from mp_agent.probe.fp8.sampling import Fp8Sampling
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import FP8

_NONE: Mapping[str, tuple[str, ...]] = {}


class StepFp8:
    """The operands of linear layers, in the first forward and backward pass of sampled steps."""

    def __init__(self, sampling: Fp8Sampling, note_unsupported: Callable[[str], None]) -> None:
        self._sampling = sampling
        self._note_unsupported = note_unsupported
        self._found: Fp8Layers | None = None
        self._layers = _NONE
        self._begun = False
        self._passes = 0

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the layers, by family; the same object while they are the same."""
        if model is not None and (self._found is None or not self._found.is_of(model)):
            self._look_at(model)
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Put hooks on the layers for the next forward pass."""
        self._begun, self._passes = False, 0
        if model is None:
            return
        found = self._look_at(model)  # scripts add, wrap and replace modules
        for feature in found.not_covered:
            self._note_unsupported(feature)
        if found.names:
            self._sampling.begin(found)
            self._begun = True

    def end(self, step: OpenStep) -> None:
        """Remove the hooks from the layers; outputs keep theirs for the backward pass."""
        self._passes += 1
        self._sampling.forward_ended()

    def backward_ended(self, step: OpenStep) -> None:
        """Do nothing: rows are complete when the step is about to end."""

    def finish(self, step: OpenStep) -> None:
        """Add to the step what was measured."""
        if not self._begun:
            return
        self._begun = False
        rows_MC = self._sampling.take(one_pass=self._passes == 1)
        if rows_MC is not None:
            step.own_rows[FP8.name] = rows_MC
            step.streams.update(self._sampling.streams)

    def close(self) -> None:
        """Remove the hooks."""
        self._begun = False
        self._sampling.close()

    def _look_at(self, model: nn.Module) -> Fp8Layers:
        found = self._found = Fp8Layers(model)
        names = {FP8.name: found.names} if found.names else _NONE
        self._layers = self._layers if names == self._layers else names
        return found
