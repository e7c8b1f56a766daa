"""State of one thread's training loop: steps, closures, losses, and its gradients.

What happens to gradients between backward, which makes them, and the optimizer's step.
Clipping, or a division by a loss scale, that calls no hook changes them all by one factor. The
numbers of a step do not show whether its norm and its loss are those of before or after that; the
factor does.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from types import FrameType
from typing import TypeVar

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.probe import accelerator
from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.loop_order import gradient_parts
from mp_agent.probe.optimizers.plan import (
    LayerSlot,
    MeasurementPlan,
    change_count,
    counting_changes,
    local_of,
)
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.scalars import Scalar, ScalarSnapshot, add, scalar_of
from mp_agent.probe.step.loss_graph import constant_factor
from mp_agent.ring.interruptions import pass_on


def running_step(identity: int) -> Optimizer | None:
    """Return the optimizer of that `id` if this thread is within its step; None if it is not."""
    return next(_running_steps(identity), None)


def is_step_within_its_own(identity: int) -> bool:
    """Return whether a step of that optimizer runs within another, as where one calls its base's.

    torch puts hooks around both, if it has made an optimizer of the base class, too.
    """
    return len(list(islice(_running_steps(identity), 2))) == 2


def _running_steps(identity: int) -> Iterator[Optimizer]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is STEP:
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer) and id(optimizer) == identity:
                yield optimizer
        frame = frame.f_back


def _nothing(optimizer: Optimizer) -> None:
    """Do nothing, in place of a step."""


STEP = Optimizer.profile_hook_step(_nothing).__code__
"""What torch puts around the step of every optimizer; all hooks on steps run within."""


class ScaledLosses:
    """Losses as they were before a GradScaler scaled them, until the next backward has begun."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], Scalar]] = {}

    def __bool__(self) -> bool:
        return bool(self._before)

    def note(self, outputs: object, scaled: object) -> None:
        """Remember what each of the `scaled` tensors was, among `outputs`, before."""
        for before, after in zip(_listed(outputs), _listed(scaled), strict=False):
            loss = scalar_of(before)
            if loss is not None and isinstance(after, torch.Tensor):
                self._before[id(after)] = weakref.ref(after), loss

    def clear(self) -> None:
        """Forget all losses."""
        self._before.clear()

    def knows(self, roots: object) -> bool:
        """Return whether any of the roots of a backward is a scaler's result."""
        return any(self.before(root) is not None for root in _listed(roots))

    def before(self, root: object) -> Scalar | None:
        """Return what `root` was before it was scaled; None when it is no scaler's result."""
        found = self._before.get(id(root))
        return found[1] if found is not None and found[0]() is root else None


def loss_of(
    roots: object, seeds: object, scaled: ScaledLosses, inverse_scale: Scalar
) -> Scalar | None:
    """Return the sum of the roots that are single numbers, each times the gradient it is seeded by.

    inverse_scale: 1 / the scale of what was computed from several scaled losses. Returns None when
    there is no such root.
    """
    total: Scalar | None = None
    for root, seed in _seeded(roots, seeds):
        weight = 1.0 if seed is None else scalar_of(seed)
        loss = scaled.before(root)
        if loss is None and (loss := scalar_of(root)) is not None and scaled:
            loss = loss * inverse_scale
        if loss is not None and weight is not None:
            total = add(total, loss if seed is None else loss * weight)
    return total


def _seeded(roots: object, seeds: object) -> Iterable[tuple[object, object]]:
    listed = _listed(roots)
    gradients = [None] * len(listed) if seeds is None else _listed(seeds)
    return zip(listed, gradients, strict=False)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


T = TypeVar("T")

_EARLY_STEPS = 128
_EARLY_INTERVAL = 4
_INTERVAL = 32
_ALIKE = 2.0
"""Ratio of the factors of two gradients from which on they are not that of one scale."""


class GradientTrace:
    """Compares a few gradients after the last backward of a step with what is then measured.

    Where the optimizer steps FP32 copies, whose gradients the script makes of those of the model's
    own parameters, all of both are compared.
    """

    def __init__(self) -> None:
        self.loss_factor: Scalar | None = None
        """By what the loss was multiplied last; only where backward makes no gradients of the
        optimizer's own tensors, of which the division by it would be seen."""
        self._before: list[torch.Tensor] | None = None
        """Parts of the gradients as the last backward left them; None: not looked at."""
        self._makes_none = False
        """The last backward has made none of the optimizer's gradients."""
        self._possible = True

    def backward_begins(self, roots: object, sequence: int) -> None:
        """Look at how the loss was made, if step `sequence` is looked at."""
        root = roots[0] if isinstance(roots, (list, tuple)) and roots else roots
        looked_at = _is_due(sequence) and self._makes_none
        self.loss_factor = constant_factor(root) if looked_at else None

    def backward_ended(self, plan: MeasurementPlan, sequence: int, *, made_any: bool) -> None:
        """Keep parts of the gradients that backward has left, if step `sequence` is looked at.

        made_any: whether it has made any of the gradients of `plan`, or added to them.
        """
        self._before, self._makes_none = None, not made_any
        if made_any and self._looks_at(plan, sequence):
            self._before = self._tried(lambda: [part.clone() for part in gradient_parts(plan)])

    def is_idle(self, sequence: int) -> bool:
        """Return whether nothing is known, or looked for, of step `sequence`."""
        return self._before is None and self.loss_factor is None and not _is_due(sequence)

    def changes(self, plan: MeasurementPlan, sequence: int) -> tuple[Scalar, Scalar] | None:
        """Return what has become of the present gradients since backward.

        The first number is that by which they were multiplied, as the ratio of norms: 1 exactly, if
        nothing has changed them; NaN, if it is of 0 or of what is not finite; 0, if they share
        none, as where each was clipped by itself. The second is 1 if NaN or Inf were replaced by
        finite numbers, else 0. None where that is not known, or the step is not looked at.
        """
        before, self._before = self._before, None
        if not self._looks_at(plan, sequence):
            return None
        return self._tried(lambda: _changes(plan, before))

    def _looks_at(self, plan: MeasurementPlan, sequence: int) -> bool:
        return self._possible and _is_due(sequence) and accelerator.is_supported(plan.device)

    def _tried(self, look: Callable[[], T]) -> T | None:
        """Return what `look` does; None from then on where gradients are of a kind that raises."""
        try:
            return look()
        except (RuntimeError, TypeError) as error:
            pass_on(error)
            self._possible = False
            return None


def _changes(
    plan: MeasurementPlan, before: list[torch.Tensor] | None
) -> tuple[Scalar, Scalar] | None:
    if copied := _gradients(plan.copies):
        before, now = _gradients(source() for source in plan.sources), copied
    else:
        now = gradient_parts(plan)
        if before is not None and len(before) != len(now):
            return None
    if not before or not now:
        return None
    parts_before, parts = _norms(before), _norms(now)
    norm_before, norm = (torch.linalg.vector_norm(each) for each in (parts_before, parts))
    replaced = torch.isfinite(norm) & ~torch.isfinite(norm_before)
    ratio = norm / norm_before
    if len(parts) == len(parts_before):  # not where one flat copy stands for all
        ratios = parts / parts_before
        least, most = ratios.nan_to_num(inf).amin(), ratios.nan_to_num(0.0, 0.0).amax()
        ratio = torch.where(most > _ALIKE * least, 0.0, ratio)
    factor, flag = scalar_of(ratio), scalar_of(replaced.to(norm.dtype))
    return None if factor is None or flag is None else (factor, flag)


def _is_due(sequence: int) -> bool:
    interval = _EARLY_INTERVAL if sequence <= _EARLY_STEPS else _INTERVAL
    return sequence % interval == 0


def _gradients(parameters: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    found = [each.grad for each in parameters if each is not None]
    return [local_of(gradient.detach()) for gradient in found if gradient is not None]


def _norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors])


class ThreadProgress(threading.local):
    """The state of the loop that this thread runs; another thread may train another model.

    stepping: `id` of the outermost optimizer within whose step we are.
    steps_within: how many steps of the same optimizer have begun within that step, and not ended.
    enclosing: `id` and optimizer of a step that was counted although it is still running.
    closure_awaited: that step was given a closure, which has not returned yet.
    closure_made_gradients: there was a backward in the closure that was called last.
    scaler: has scaled a loss, and not unscaled the gradients of all but the `unscaled` optimizers.
    scaler_settles: whether it may do so, or may have done so, for an optimizer that is not known.
    backward_scaled: whether the backward under way began with a loss that it has scaled.
    """

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self.scale_now = ScalarSnapshot()
        self.unscaled: set[str] = set()
        self.scaler_settles = self.backward_scaled = False
        self.scaled_losses = ScaledLosses()
        self.scaler_steps: WatchedOptimizer | None = None
        self.stepping: int | None = None
        self.steps_within = 0
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
        """Loss of the backward that is about to begin."""
        self.clipped: list[WatchedOptimizer] = []
        """Optimizers whose gradients are being clipped."""
        self.clips_late = False
        """The clipping under way is of gradients that were used already."""
        self.autocast_step = 0
        """Number of the step in which autocast to 16 bits was last on for training."""
        self.measures: set[str] = set()
        """Labels of the optimizers whose gradients this thread makes."""
        self.weights = WeightsMark()
        self.gradients = GradientsMark()
        self.trace = GradientTrace()


class WeightsMark:
    """Notices that weights were changed in place, by torch's own count of such changes."""

    def __init__(self) -> None:
        self._marked: list[tuple[TensorRef, int]] = []

    def set(self, plan: MeasurementPlan) -> None:
        """Regard the weights of `plan` as unchanged as they are now."""
        ends = (_first_trained(plan.slots), _first_trained(reversed(plan.slots)))
        self._marked = _marks(each for each in ends if each is not None)

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
        self._marked: list[tuple[TensorRef, int]] = []
        self.touched_places: frozenset[int] = frozenset()
        """Places in the plan of the parameters whose gradients the last backward has made."""
        self._after: list[TensorRef | None] = []
        """All that existed after backward, those that it has left alone too."""

    def backward_begins(self, plan: MeasurementPlan) -> None:
        """Record the gradients that exist already, to which this backward adds."""
        self._marked, self._after = [], []
        self._before = [
            None if gradient is None else (id(gradient), change_count(gradient))
            for gradient in self._inspected(plan)
        ]

    def backward_ended(self, plan: MeasurementPlan) -> None:
        """Regard the gradients that it has made, or added to, as unchanged as they are now."""
        gradients, places = self._inspected(plan), self._places(plan)
        if len(gradients) == len(self._before):
            made = {
                place: gradient
                for place, gradient, before in zip(places, gradients, self._before, strict=True)
                if gradient is not None and (id(gradient), change_count(gradient)) != before
            }
            self.touched_places = frozenset(made)
            self._marked = _marks(made.values())
            self._after = [None if each is None else TensorRef(each) for each in gradients]
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


def _marks(tensors: Iterable[torch.Tensor]) -> list[tuple[TensorRef, int]]:
    """Return tensors, until they are gone, with how often each was changed in place."""
    counting = (each for tensor in tensors for each in counting_changes(tensor))
    return [(TensorRef(each), each._version) for each in counting]


def _first_trained(slots: Iterable[LayerSlot]) -> torch.Tensor | None:
    parameters = (slot.parameter for slot in slots)
    return next((parameter for parameter in parameters if parameter.requires_grad), None)


def within_backward() -> bool:
    """Return whether autograd is calling us, on this thread or one of its own."""
    return torch._C._current_graph_task_id() != -1
