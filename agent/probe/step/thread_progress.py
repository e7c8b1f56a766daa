"""State of one thread's training loop: within a backward, an optimizer's step, a closure."""

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.amp import GradScaler

from mp_agent.probe.optimizers.layer_slots import LayerSlot
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.watched import WatchedOptimizer
from mp_agent.probe.scalars import Scalar, ScalarSnapshot
from mp_agent.probe.step.backward_loss import ScaledLosses
from mp_agent.probe.step.gradient_trace import GradientTrace


class ThreadProgress(threading.local):
    """The state of the loop that this thread runs; another thread may train another model.

    stepping: `id` of the outermost optimizer within whose step we are.
    enclosing: `id` and optimizer of a step that was counted although it is still running.
    closure_awaited: that step was given a closure, which has not returned yet.
    closure_made_gradients: there was a backward in the closure that was called last.
    scaler: has scaled a loss, and not unscaled the gradients of all but the `unscaled` optimizers.
    """

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self.scale_now = ScalarSnapshot()
        self.unscaled: set[str] = set()
        self.scaled_losses = ScaledLosses()
        self.scaler_steps: WatchedOptimizer | None = None
        self.stepping: int | None = None
        self.enclosing: tuple[int, WatchedOptimizer] | None = None
        self.in_closure = False
        self.closure_awaited = False
        self.closure_made_gradients = False
        self.optimizer_stepped = False
        self.in_backward = False
        self.engine_steps = False
        """A framework's engine is stepping: what its optimizer does is part of that."""
        self.in_schedule = False
        """A pipeline schedule is running, which will report the loss of its backwards."""
        self.schedule_scales = False
        """A GradScaler has scaled the losses of its micro-batches."""
        self.announced_loss: Scalar | None = None
        """Of the backward that is about to begin."""
        self.clipped: list[WatchedOptimizer] = []
        """Optimizers whose gradients are being clipped."""
        self.measures: set[str] = set()
        """Labels of the optimizers whose gradients this thread makes."""
        self.weights = WeightsMark()
        self.gradients = GradientsMark()
        self.trace = GradientTrace()


class WeightsMark:
    """Notices that weights were changed in place, by torch's own count of such changes."""

    def __init__(self) -> None:
        self._marked: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def set(self, plan: MeasurementPlan) -> None:
        """Regard the weights of `plan` as unchanged as they are now."""
        ends = (_first_trained(plan.slots), _first_trained(reversed(plan.slots)))
        self._marked = [(weakref.ref(each), each._version) for each in ends if each is not None]

    def forget(self) -> None:
        """Regard them as unchanged until the next `set`: changes from now on are allowed."""
        self._marked = []

    @property
    def is_set(self) -> bool:
        """Whether there are weights that `moved` is about."""
        return bool(self._marked)

    @property
    def moved(self) -> bool:
        """Whether the first or the last of the trained weights has changed since."""
        return any(
            (parameter := reference()) is not None and parameter._version != version
            for reference, version in self._marked
        )


class GradientsMark:
    """Notices that gradients were changed in place after backward, by torch's count of changes.

    Only the first, a middle and the last one are inspected; all of them once a backward has left
    these alone. What is done to `grad.data` is not counted.
    """

    def __init__(self) -> None:
        self._inspects_all = False
        self._none_made = False
        self._before: list[tuple[int, int] | None] = []
        self._marked: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self.touched_places: frozenset[int] = frozenset()
        """In the plan, of the parameters whose gradients the last backward has made."""
        self._after: list[weakref.ref[torch.Tensor] | None] = []
        """All that existed after backward, those that it has left alone too."""

    def backward_begins(self, plan: MeasurementPlan) -> None:
        """Record the gradients that exist already, to which this backward adds."""
        self._marked, self._after = [], []
        self._before = [
            None if gradient is None else (id(gradient), gradient._version)
            for gradient in self._inspected(plan)
        ]

    def backward_ended(self, plan: MeasurementPlan) -> None:
        """Regard the gradients that it has made, or added to, as unchanged as they are now."""
        gradients, places = self._inspected(plan), self._places(plan)
        if len(gradients) == len(self._before):
            made = {
                place: gradient
                for place, gradient, before in zip(places, gradients, self._before, strict=True)
                if gradient is not None and (id(gradient), gradient._version) != before
            }
            self.touched_places = frozenset(made)
            self._marked = [(weakref.ref(each), each._version) for each in made.values()]
            self._after = [None if each is None else weakref.ref(each) for each in gradients]
            self._none_made = not self._marked and (
                self._inspects_all or all(slot.parameter.grad is None for slot in plan.slots)
            )
            self._inspects_all |= not self._marked

    def forget(self) -> None:
        """Regard them as unchanged until the next backward: changes from now on are allowed."""
        self._marked, self._after = [], []

    @property
    def touched(self) -> bool:
        """Whether the last backward has made, or added to, any of them."""
        return bool(self._marked)

    @property
    def untouched(self) -> bool:
        """Whether it has made none of all gradients, those that are not inspected included."""
        return self._none_made and not self._marked

    @property
    def moved(self) -> bool:
        """Whether any of them has changed since."""
        return any(
            (gradient := reference()) is not None and gradient._version != version
            for reference, version in self._marked
        )

    def replaced_in(self, plan: MeasurementPlan) -> bool:
        """Return whether parameters of `plan` have other gradients than backward left there."""
        now = self._inspected(plan)
        return len(now) == len(self._after) and any(
            gradient is not (None if reference is None else reference())
            for gradient, reference in zip(now, self._after, strict=True)
        )

    def _inspected(self, plan: MeasurementPlan) -> list[torch.Tensor | None]:
        return [plan.slots[place].parameter.grad for place in self._places(plan)]

    def _places(self, plan: MeasurementPlan) -> Sequence[int]:
        count = len(plan.slots)
        if self._inspects_all:
            return range(count)
        return sorted({0, count // 2, count - 1}) if count else []


def _first_trained(slots: Iterable[LayerSlot]) -> torch.Tensor | None:
    parameters = (slot.parameter for slot in slots)
    return next((parameter for parameter in parameters if parameter.requires_grad), None)


def within_backward() -> bool:
    """Return whether autograd is calling us, on this thread or one of its own."""
    return torch._C._current_graph_task_id() != -1
