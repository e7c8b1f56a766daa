"""What one thread is in the middle of: a backward, an optimizer's step, a closure."""

import threading
import weakref

import torch
from torch.amp import GradScaler

from mp_agent.probe.plan import Plan
from mp_agent.probe.roots import ScaledLosses
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.subject import Subject


class Moment(threading.local):
    """The state of the loop that this thread runs; another thread trains a model of its own.

    stepping: `id` of the outermost optimizer within whose step we are.
    closure_awaited: that step was given a closure, which has not returned yet.
    closure_made_gradients: there was a backward in the closure that was called last.
    scaler: has scaled a loss, and not unscaled the gradients of all but the `unscaled` optimizers.
    """

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self.unscaled: set[str] = set()
        self.scaled_losses = ScaledLosses()
        self.scaler_steps: Subject | None = None
        self.stepping: int | None = None
        self.in_closure = False
        self.closure_awaited = False
        self.closure_made_gradients = False
        self.optimizer_stepped = False
        self.in_backward = False
        self.engine_steps = False
        """A framework's engine is stepping: what its optimizer does is part of that."""
        self.announced_loss: Scalar | None = None
        """Of the backward that is about to begin."""
        self.clipped: list[Subject] = []
        """Optimizers whose gradients are being clipped."""
        self.measures: set[str] = set()
        """Labels of the optimizers whose gradients this thread makes."""
        self.weights = WeightsMark()


class WeightsMark:
    """Notices that weights were changed in place, by torch's own count of such changes."""

    def __init__(self) -> None:
        self._marked: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def set(self, plan: Plan) -> None:
        """Take the weights of `plan` for unchanged as they are now."""
        trained = [slot.parameter for slot in plan.slots if slot.parameter.requires_grad]
        ends = trained[:1] + trained[-1:]
        self._marked = [(weakref.ref(parameter), parameter._version) for parameter in ends]

    def forget(self) -> None:
        """Take them for unchanged until the next `set`: whoever changes them now may."""
        self._marked = []

    @property
    def moved(self) -> bool:
        """Whether the first or the last of the trained weights has changed since."""
        return any(
            (parameter := reference()) is not None and parameter._version != version
            for reference, version in self._marked
        )


def within_backward() -> bool:
    """Return whether autograd is calling us, on this thread or one of its own."""
    return torch._C._current_graph_task_id() != -1
