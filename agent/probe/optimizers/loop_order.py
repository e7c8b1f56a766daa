"""The order of the loop: which gradients are used, used again, discarded, and clipped too late.

Which tensors the gradients are, and torch's count of in-place changes, show whether they were
cleared or added to; next to no number of theirs is read. Only what is done to `grad.data` is not
counted.

Healthy loops discard gradients too: a GAN's critic those of the generator's backward, adversarial
examples, per-task gradients and meta-learning whole backwards. What counts is a backward of which
no optimizer has used anything, made by the same line of code as one that was used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from mp_agent.probe import accelerator
from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.engine import EnginePlan
from mp_agent.probe.optimizers.plan import MeasurementPlan, change_count, local_of
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.records.columns import (
    ACCUMULATION_BYPASSED,
    BACKWARDS_DISCARDED,
    BATCH_NORM_MOMENTUM,
    BETAS_SWAPPED,
    EVALUATED_IN_TRAINING,
    GRADIENTS_ADD_UP,
    LEFT_IN_EVALUATION,
    STEP_REPEATED,
    STEP_SCALED,
)

if TYPE_CHECKING:
    from mp_agent.probe.optimizers.roles import WatchedOptimizer

_LOOK_INTERVAL_STEPS = 16
"""Consecutive steps that seem to add up after which numbers are read: what clears `grad.data` is
not counted by torch. Less than the steps by which that is a mistake."""
_PASSES_AT_MOST = 64
_SUSPECT_STEPS = 8
"""Steps for which lines of code are compared after one on which a backward was discarded."""
_FRAMES_AT_MOST = 64
_ELEMENTS = 256
"""Number of elements of each inspected gradient."""
_TENSORS = 3
_UNCHANGED = 1e-6
"""Relative difference of norms that rounding makes."""


@dataclass(slots=True)
class _Pass:
    """A backward, and the optimizers that hold gradients of it, which no step has used."""

    line: int
    """Where the script, as deep as it was, called it; 0: not known."""
    holders: set[WatchedOptimizer]
    clipped: bool = False


class LoopOrder:
    """Follows the gradients of the watched optimizers from their backwards to their steps."""

    def __init__(self) -> None:
        self._line = 0
        self._passes: list[_Pass] = []
        self.discarded: list[int] = []
        """The lines of the backwards since the run's last step that no step has used."""
        self._suspect_until = 0
        """Step up to which lines of code are compared."""
        self._changed_by_script = False
        self.scaler_bypassed = False
        """An optimizer has stepped with gradients that a scaler had not unscaled."""
        self._micro_batches = 0
        """Those that a framework has announced, which adds up their gradients itself."""
        self._announced = False
        """The next backward is that of one."""
        self._per_step = 0
        """Of them; 0: the next step may have fewer, and is as the one before."""

    def micro_batch_begins(self, per_step: int, *, last: bool) -> None:
        """Count a micro-batch of a framework that steps after `per_step`, or after the last."""
        self._micro_batches += 1
        self._announced = True
        self._per_step = 0 if last else per_step

    def backward_begins(self, known: Iterable[WatchedOptimizer], sequence: int) -> None:
        """Find which gradients were cleared since the last event."""
        for watched in known:
            if not _follows(watched):
                continue
            use = watched.use
            if use.backward_begins():
                self._cleared(watched, sequence)
            if use.kept and use.steps_adding_up % _LOOK_INTERVAL_STEPS == _LOOK_INTERVAL_STEPS - 1:
                use.remains = _remains(watched)
        self._line = _line() if sequence <= self._suspect_until else 0

    def backward_ended(
        self, known: Iterable[WatchedOptimizer], *, in_closure: bool, scaled: bool
    ) -> None:
        """Find of which optimizers it has made gradients; a closure uses its own itself."""
        holders = {
            each for each in known if _follows(each) and each.use.backward_ended(scaled=scaled)
        }
        if self._announced:
            self._announced = False
            for each in holders:
                each.use.of_micro_batch = True
        if self._line:
            for each in holders:
                each.use.note_addresses()
        if holders and not in_closure:
            self._passes = [*self._passes[1 - _PASSES_AT_MOST :], _Pass(self._line, holders)]

    def gradients_may_change(self, known: Iterable[WatchedOptimizer]) -> None:
        """Expect other gradients in the same tensors: those of a backward that is not followed."""
        for each in known:
            each.use.may_change()

    def gradients_kept(self) -> None:
        """Count the backwards so far as used: an engine has added up their gradients elsewhere."""
        self._passes = []

    def script_changes_gradients(self) -> None:
        """Note that the step uses other gradients than backward has made, by the script's hand."""
        self._changed_by_script = True

    def clips(self, clipped: Sequence[WatchedOptimizer]) -> bool:
        """Return whether gradients are about to be clipped that were used already, all of them.

        Others may be used although they are cleared then: who clips them may add them up elsewhere.
        """
        if clipped and all(_follows(each) and each.use.is_as_used for each in clipped):
            return True
        for each in self._passes:
            each.clipped = True
        for watched in clipped:
            watched.use.clips()
        return False

    def stepped(
        self,
        watched: WatchedOptimizer,
        known: Iterable[WatchedOptimizer],
        scalars: dict[str, Scalar],
        *,
        skipped: bool,
    ) -> None:
        """Note in `scalars` what the optimizer has stepped with, and the mode of its model."""
        if watched.mode.is_known:
            watched.mode.stepped()
        for each in known:
            if each.mode.was_left:
                scalars[LEFT_IN_EVALUATION] = 1.0
            if each.mode.evaluated_in_training:
                scalars[EVALUATED_IN_TRAINING] = 1.0
            if each.mode.forgets:
                scalars[BATCH_NORM_MOMENTUM] = 1.0
            if each.betas_swapped and each.has_swapped_betas():
                scalars[BETAS_SWAPPED] = 1.0
        if self.discarded and watched.of_run and not skipped:
            self._note_discarded(watched, scalars)
        if self._passes:
            self._passes = [each for each in self._passes if watched not in each.holders]
        if self._micro_batches:
            made = self._micro_batches - watched.use.micro_batches
            watched.use.micro_batches = self._micro_batches
            if self._per_step and watched.use.of_micro_batch:
                watched.use.bypasses = made < self._per_step
            watched.use.of_micro_batch = False
            if watched.use.bypasses and made:
                scalars[ACCUMULATION_BYPASSED] = 1.0
        if skipped:
            return
        watched.use.used(watched.plan)
        if (adds_up := any_of(each.use.adds_up for each in known)) is not None:
            scalars[GRADIENTS_ADD_UP] = adds_up
        if watched.use.repeats:
            scalars[STEP_REPEATED] = 1.0
        if self.scaler_bypassed:
            flag = any_of(each.use.steps_scaled for each in known)
            scalars[STEP_SCALED] = 0.0 if flag is None else flag

    def _note_discarded(self, watched: WatchedOptimizer, scalars: dict[str, Scalar]) -> None:
        """Compare the backwards that an optimizer has used with those that none has."""
        used = {each.line for each in self._passes if watched in each.holders}
        discarded, self.discarded = self.discarded, []
        own, self._changed_by_script = self._changed_by_script, False
        count = sum(line != 0 and line in used for line in discarded)
        if count and not own and not watched.use.is_replaced:
            scalars[BACKWARDS_DISCARDED] = float(count)

    def _cleared(self, watched: WatchedOptimizer, sequence: int) -> None:
        for each in self._passes:
            each.holders.discard(watched)
            if not each.holders:
                line = 0 if each.clipped else each.line
                self.discarded = [*self.discarded[1 - _PASSES_AT_MOST :], line]
                self._suspect_until = sequence + _SUSPECT_STEPS
        self._passes = [each for each in self._passes if each.holders]


def _follows(watched: WatchedOptimizer) -> bool:
    """Return whether this thread makes the gradients: others' are not to be read meanwhile."""
    return watched.thread == get_ident()


def any_of(flags: Iterable[Scalar | None]) -> Scalar | None:
    """Return 1 if any is 1, as far as that is known here, else what a device knows; or None."""
    listed = [each for each in flags if each is not None]
    if any(each for each in listed if not isinstance(each, torch.Tensor)):
        return 1.0
    on_devices = [each for each in listed if isinstance(each, torch.Tensor)]
    if not on_devices:
        return None
    return scalar_of(torch.stack(accelerator.on_one_device(on_devices)).amax())


def is_left_scaled(scale: Scalar | None, factor: Scalar | None) -> Scalar | None:
    """Return whether a loss scale is in gradients: 1 or 0; None where that is not known.

    factor: by what they were multiplied since backward.
    """
    if scale is None or factor is None:
        return None
    if isinstance(scale, torch.Tensor) and isinstance(factor, torch.Tensor):
        scale, factor = accelerator.on_one_device([scale, factor])
    unchanged = (factor >= 1.0 - _UNCHANGED) & (factor <= 1.0 + _UNCHANGED)
    found: bool | torch.Tensor = (scale != 1.0) & unchanged
    return scalar_of(found.double()) if isinstance(found, torch.Tensor) else float(found)


def _remains(watched: WatchedOptimizer) -> Scalar | None:
    """Return whether any of a few numbers of the gradients is not 0: 1 or 0."""
    plan = watched.plan()
    parts = [] if plan is None else gradient_parts(plan)
    parts = parts or _first_elements(watched.use.gradients())
    if not parts:
        return 0.0
    counts = torch.stack([part.count_nonzero() for part in parts])
    return scalar_of((counts.sum() > 0).double())


def gradient_parts(plan: MeasurementPlan) -> list[torch.Tensor]:
    """Return the first elements of a few gradients as they are; of those there are."""
    slots = plan.slots
    places = sorted({len(slots) * part // _TENSORS for part in range(_TENSORS)} | {len(slots) - 1})
    return _first_elements([slots[place].parameter.grad for place in places if slots])


def _first_elements(gradients: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    local = [local_of(gradient.detach()) for gradient in gradients if gradient is not None]
    return [
        (each if each.is_contiguous() else each[:1]).flatten()[:_ELEMENTS]  # copies no whole one
        for each in local
        if each.layout is torch.strided and each.is_floating_point() and each.numel()
    ]


def _line() -> int:
    """Return what stands for the line of code that runs, and for all that have called it."""
    found: list[tuple[int, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES_AT_MOST:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(found))


_State = tuple[int, int]
"""Which tensor a gradient is, and how often it was changed in place."""


class GradientUse:
    """Follows the first, a middle and the last of the gradients that an optimizer has used.

    adds_up: whether its last step used, besides new gradients, those of the step before: 1 or 0,
    on a device where that depends on their numbers; None where it is not known.
    repeats: whether its last step, or the one before, used the gradients of the step before that
    again, unchanged, with no backward in between.
    """

    def __init__(self) -> None:
        self.adds_up: Scalar | None = None
        self.repeats = False
        self._name = "grad"
        """Of what a parameter has its gradient in."""
        self._found_as_left = False
        """Of the engine's step under way: see `engine_begins`."""
        self.steps_adding_up = 0
        """Consecutive ones, by all that is known without reading numbers."""
        self.remains: Scalar | None = None
        """Whether numbers of the kept gradients that were looked at are not 0."""
        self._parameters: tuple[TensorRef, ...] = ()
        self._seen: list[_State | None] = []
        """The gradients as the last event has left them."""
        self._kept = False
        """The gradients that the last step has used are there; backwards may have added to them."""
        self._left: list[_State | None] = []
        """Those of them that were left as others were cleared."""
        self._added = False
        self._again = False
        """The last step used what the one before had used."""
        self._used: list[TensorRef] = []
        """The gradients of backwards that the last step has used, if nothing can have made others.

        Whether they are the same tensors `id` does not show: a new one may get that of one gone.
        """
        self._clearing = False
        self._addresses: list[int] = []
        self._scaled = False
        """A backward that made gradients since the last step began with a scaled loss."""
        self._clipped = self._changed = False
        """Since the last backward, they were clipped, and something had changed them before."""
        self.factor: Scalar | None = None
        """By what gradients of a scaled loss were multiplied when that was last looked at."""
        self.micro_batches = 0
        """Those that a framework had announced by its last step."""
        self.of_micro_batch = False
        """Whether the backward of one has made any of them since its last step."""
        self.bypasses = False
        """Whether that had fewer of them than the framework divides losses by."""
        self.steps_scaled: Scalar | None = None
        """Whether its last step used gradients that were still multiplied by a loss scale."""

    @property
    def kept(self) -> bool:
        """Whether gradients that the last step has used were there as the last backward began."""
        return self._kept or bool(self._left)

    @property
    def is_as_used(self) -> bool:
        """Whether the gradients are still those that the last step has used, and nothing else."""
        return self._kept and not self._added and self._states() == self._seen

    @property
    def is_replaced(self) -> bool:
        """Whether others have taken the place of the gradients as `note_addresses` found them."""
        return self._addresses != self._addresses_now()

    def note_addresses(self) -> None:
        """Remember where the gradients lie; some scripts give `grad.data` others."""
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> list[int]:
        found = self.gradients()
        return [local_of(each).data_ptr() for each in found if each.layout is torch.strided]

    def gradients(self) -> list[torch.Tensor]:
        """Return those that are followed, as they are now; of those there are."""
        name = self._name
        return [g for ref in self._parameters if (g := getattr(ref(), name, None)) is not None]

    def engine_begins(self) -> bool:
        """Return whether an engine, which may clip within its step, finds what its last has left.

        No backward has begun since, and nothing has changed them.
        """
        self._found_as_left = bool(self._used) and self._states() == self._seen
        return self._found_as_left

    def clearing(self) -> None:
        """Expect `zero_grad` to clear them."""
        self._clearing = True

    def may_change(self) -> None:
        """Expect gradients to be changed by what torch does not count, as replayed graphs do."""
        self._used = []

    def backward_begins(self) -> bool:
        """Return whether the gradients that the last event has left were cleared since."""
        now, before = self._states(), self._seen
        changed = now != before
        cleared = changed and all(
            old is None or new is None or (self._clearing and new != old)
            for old, new in zip(before, now, strict=True)
        )
        if changed:
            left = self._kept and not cleared and self._name == "grad"
            pairs = zip(before, now, strict=True) if left else ()
            self._left = [new if new == old else None for old, new in pairs]
        self._kept &= not changed
        self._scaled &= not changed
        self._seen, self._clearing, self.remains, self._used = now, False, None, []
        return cleared

    def backward_ended(self, *, scaled: bool) -> bool:
        """Return whether the backward has made, or added to, any of them.

        scaled: it began with a loss that a GradScaler had multiplied.
        """
        now = self._states()
        touched = now != self._seen
        self._clipped = self._changed = False
        self._scaled |= touched and scaled
        self._added |= touched
        self._seen = now
        return touched

    def clips(self) -> None:
        """Note that they are about to be clipped."""
        self._changed |= not self._clipped and self._states() != self._seen
        self._clipped = True

    @property
    def is_scaled(self) -> bool:
        """Whether they are those of a scaled loss, which nothing but clipping has changed.

        A script may have divided them itself.
        """
        changed = self._changed or (not self._clipped and self._states() != self._seen)
        return self._scaled and not changed

    def used(self, plan: Callable[[], MeasurementPlan | None]) -> None:
        """Note that the optimizer, which has this plan, has stepped with them."""
        if self._added and (self._kept or (self._left and self._adds_to_left())):
            self.adds_up = 1.0 if self.remains is None else self.remains
            self.steps_adding_up += 1
        else:
            self.adds_up, self.steps_adding_up = 0.0, 0
        if (not self._seen or None in self._seen) and (found := plan()) is not None:
            self._name = _IN_BUFFERS if isinstance(found, EnginePlan) else "grad"
            self._parameters = tuple(map(TensorRef, _inspected(found)))
        before, self._seen = self._seen, self._states()
        same = self._found_as_left or (bool(self._used) and self._seen == before)
        again = same and all(ref() is not None for ref in self._used)
        self.repeats, self._again = again or self._again, again
        if not again:
            name, refs = self._name, self._parameters if self._added else ()  # saves a call
            used = [g for ref in refs if (g := getattr(ref(), name, None)) is not None]
            self._used = list(map(TensorRef, used))
        self._left = []
        self._added = self._scaled = self._found_as_left = False
        self._kept = any(state is not None for state in self._seen)

    def _adds_to_left(self) -> bool:
        pairs = zip(self._left, self._states(), strict=True)
        return any(a and b and a[0] == b[0] and a[1] < b[1] for a, b in pairs)

    def _states(self) -> list[_State | None]:
        found: list[_State | None] = []
        for reference in self._parameters:
            gradient = getattr(reference(), self._name, None)
            if gradient is None:
                found.append(None)
            elif type(gradient) is torch.Tensor:  # several times a step: saves a call
                found.append((id(gradient), gradient._version))
            else:
                found.append((id(gradient), change_count(gradient)))
        return found


_IN_BUFFERS = "main_grad"
"""Where a wrapper that adds gradients up in its own buffers keeps that of a parameter."""


def _inspected(plan: MeasurementPlan) -> list[torch.Tensor]:
    """Return the first, a middle and the last of the parameters that have gradients."""
    found = [slot.parameter for slot in plan.slots if slot.parameter.grad is not None]
    if isinstance(plan, EnginePlan) and plan.announces_reduction and plan.root is not None:
        root = plan.root()
        own = () if root is None else nn.Module.parameters(root)
        found = [each for each in own if isinstance(getattr(each, _IN_BUFFERS, None), torch.Tensor)]
    return [found[at] for at in sorted({0, len(found) // 2, len(found) - 1})] if found else []
