"""What is measured in the forward pass of a step, before anything is known of its gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from mp_agent.probe.step.open_step import OpenStep

Contain = Callable[..., None]
"""`Guard.contain`: a kind of failure, a function, and its arguments."""


class ForwardPart(Protocol):
    """Measures families that are not of parameters, in the first forward pass of a sampled step."""

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the layers, by family; the same object while they are the same."""

    def begin(self, model: nn.Module | None) -> None:
        """Prepare the model for its next forward pass."""

    def end(self, step: OpenStep) -> None:
        """Leave the model as it was, and add what was measured to the step."""

    def backward_ended(self, step: OpenStep) -> None:
        """Add to the step what was measured in the backward pass after that."""

    def close(self) -> None:
        """Leave the model as it was."""


@runtime_checkable
class BackwardPart(ForwardPart, Protocol):
    """One that measures the backward pass after it as well; `end` leaves the step as it is."""

    def finish(self, step: OpenStep) -> None:
        """Add what was measured in both to the step, which is about to end."""


class ForwardPass:
    """Several such parts; the failure of one leaves the others as they are."""

    def __init__(self, contain: Contain, parts: Mapping[str, ForwardPart]) -> None:
        """parts: by what is measured, for the log of failures."""
        self._contain = contain
        self._parts = parts
        self._found: Sequence[Mapping[str, tuple[str, ...]]] = ()
        self._layers: Mapping[str, tuple[str, ...]] = {}

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of all layers, by family; the same object while they are the same."""
        found = [part.layers(model) for part in self._parts.values()]
        if len(found) != len(self._found) or any(
            now is not before for now, before in zip(found, self._found, strict=True)
        ):
            layers = {family: names for each in found for family, names in each.items()}
            self._layers = self._layers if layers == self._layers else layers
            self._found = found
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Prepare the model for its next forward pass."""
        for what, part in self._parts.items():
            self._contain(f"preparing to measure {what}", part.begin, model)

    def end(self, step: OpenStep) -> None:
        """Leave the model as it was, and add what was measured to the step."""
        for what, part in self._parts.items():
            self._contain(f"measuring {what}", part.end, step)

    def finish(self, step: OpenStep) -> None:
        """Add to the step, which is about to end, what was measured until the end of backward."""
        for what, part in self._parts.items():
            if isinstance(part, BackwardPart):
                self._contain(f"measuring {what}", part.finish, step)

    def backward_ended(self, step: OpenStep) -> None:
        """Add to the step what was measured in the backward pass after that."""
        for what, part in self._parts.items():
            self._contain(f"measuring {what} in backward", part.backward_ended, step)

    def close(self) -> None:
        """Leave the model as it was."""
        for what, part in self._parts.items():
            self._contain(f"measuring {what}", part.close)
