"""The order of the loop: which gradients are used, used again, discarded, and clipped too late.

Healthy loops discard gradients too: a GAN's critic those of the generator's backward, adversarial
examples, per-task gradients and meta-learning whole backwards. What counts is a backward of which
no optimizer has used anything, made by the same line of code as one that was used.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import get_ident
from types import FrameType

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.thread_progress import gradient_parts
from mp_agent.records.columns import (
    BACKWARDS_DISCARDED,
    GRADIENTS_ADD_UP,
    LEFT_IN_EVALUATION,
    STEP_REPEATED,
)

_LOOK_INTERVAL_STEPS = 16
"""Consecutive steps that seem to add up after which numbers are read: what clears `grad.data` is
not counted by torch. Less than the steps by which that is a mistake."""
_PASSES_AT_MOST = 64
_SUSPECT_STEPS = 8
"""Steps for which lines of code are compared after one on which a backward was discarded."""
_FRAMES_AT_MOST = 64


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

    def backward_ended(self, known: Iterable[WatchedOptimizer], *, in_closure: bool) -> None:
        """Find of which optimizers it has made gradients; a closure uses its own itself."""
        holders = {each for each in known if _follows(each) and each.use.backward_ended()}
        if self._line:
            for each in holders:
                each.use.note_addresses()
        if holders and not in_closure:
            self._passes = [*self._passes[1 - _PASSES_AT_MOST :], _Pass(self._line, holders)]

    def gradients_may_change(self, known: Iterable[WatchedOptimizer]) -> None:
        """Expect other gradients in the same tensors: those of a backward that is not followed."""
        for each in known:
            each.use.may_change()

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
        return False

    def stepped(
        self,
        watched: WatchedOptimizer,
        known: Iterable[WatchedOptimizer],
        step: OpenStep,
        *,
        skipped: bool,
    ) -> None:
        """Note in `step` what the optimizer has stepped with, and the mode of its model."""
        if watched.mode.is_known:
            watched.mode.stepped()
        for each in known:
            if each.mode.was_left:
                step.scalars[LEFT_IN_EVALUATION] = 1.0
        if watched.managed:
            return
        if self.discarded and watched.of_run and not skipped:
            self._note_discarded(watched, step)
        if self._passes:
            self._passes = [each for each in self._passes if watched not in each.holders]
        if skipped:
            return
        watched.use.used(watched.plan)
        if (adds_up := _any_of(each.use.adds_up for each in known)) is not None:
            step.scalars[GRADIENTS_ADD_UP] = adds_up
        if watched.use.repeats:
            step.scalars[STEP_REPEATED] = 1.0

    def _note_discarded(self, watched: WatchedOptimizer, step: OpenStep) -> None:
        """Compare the backwards that an optimizer has used with those that none has."""
        used = {each.line for each in self._passes if watched in each.holders}
        discarded, self.discarded = self.discarded, []
        own, self._changed_by_script = self._changed_by_script, False
        count = sum(line != 0 and line in used for line in discarded)
        if count and not own and not watched.use.is_replaced:
            step.scalars[BACKWARDS_DISCARDED] = float(count)

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
    return watched.thread == get_ident() and not watched.managed


def _any_of(flags: Iterable[Scalar | None]) -> Scalar | None:
    """Return 1 if any is 1, as far as that is known here, else what a device knows; or None."""
    listed = list(flags)
    if any(each for each in listed if not isinstance(each, torch.Tensor)):
        return 1.0
    on_devices = [each for each in listed if isinstance(each, torch.Tensor)]
    if not on_devices:
        return None
    return scalar_of(torch.stack(accelerator.on_one_device(on_devices)).amax())


def _remains(watched: WatchedOptimizer) -> Scalar | None:
    """Return whether any of a few numbers of the gradients is not 0: 1 or 0."""
    plan = watched.plan()
    parts = [] if plan is None else gradient_parts(plan)
    if not parts:
        return 0.0
    counts = torch.stack([part.count_nonzero() for part in parts])
    return scalar_of((counts.sum() > 0).double())


def _line() -> int:
    """Return what stands for the line of code that runs, and for all that have called it."""
    found: list[tuple[int, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES_AT_MOST:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(found))
