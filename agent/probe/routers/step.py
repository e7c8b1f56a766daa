"""Decides which routers are measured, and adds them to the step under way."""

from collections.abc import Callable, Mapping

from torch import nn

from mp_agent.probe.routers.gates import Gates
from mp_agent.probe.routers.sampling import RouterSampling
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import ROUTERS

_NONE: Mapping[str, tuple[str, ...]] = {}


class StepRouters:
    """The routers of the run's model, in the first forward pass of sampled steps."""

    def __init__(
        self,
        sampling: RouterSampling,
        patterns: Mapping[str, int],
        note_unsupported: Callable[[str], None],
    ) -> None:
        """patterns: see `Gates`."""
        self._sampling = sampling
        self._patterns = patterns
        self._note_unsupported = note_unsupported
        self._gates: Gates | None = None
        self._layers = _NONE

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the routers, by family; the same object while they are the same."""
        if model is not None and (self._gates is None or not self._gates.is_of(model)):
            self._look_at(model)
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Put hooks on the routers for the next forward pass."""
        if model is not None:
            gates = self._look_at(model)  # scripts add, wrap and replace modules
            for feature in gates.not_covered:
                self._note_unsupported(feature)
            if gates.names:
                self._sampling.begin(gates)

    def end(self, step: OpenStep) -> None:
        """Remove the hooks, and add what was measured to the step."""
        if not self._sampling.begun:
            return
        rows_MC = self._sampling.take()
        for pattern in sorted(self._sampling.unreadable):
            self._note_unsupported(f"routers={pattern}: its output has no logits of experts")
        if rows_MC is not None:
            step.own_rows[ROUTERS.name] = rows_MC
            step.streams.update(self._sampling.streams)

    def backward_ended(self, step: OpenStep) -> None:
        """Do nothing: all is known at the end of the forward pass."""

    def close(self) -> None:
        """Remove the hooks."""
        self._sampling.end()

    def _look_at(self, model: nn.Module) -> Gates:
        gates = self._gates = Gates(model, self._patterns)
        names = {ROUTERS.name: gates.names} if gates.names else _NONE
        self._layers = self._layers if names == self._layers else names
        return gates
