"""Which step is under way, what belongs to it, and when it is complete.

The trainer's own number of a step, which after a resume is ahead of ours, found without it.
What `observe(step=…)` gives comes first, then the trainer of a framework, then the optimizer's
state, then a learning-rate scheduler that is stepped once per step.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.probe import accelerator
from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.parameter_names import optimizer_parameters
from mp_agent.probe.optimizers.roles import Role, WatchedOptimizer
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.open_step import OpenStep

ALONE_AT_MOST = 16
"""Steps of another optimizer in a row, and four times as many as it ever made in a row before, by
which it becomes the run's own."""


class StepBoundaries:
    """The step under way and, where there are several optimizers, the one before it.

    A step ends when the first optimizer, or one that is joint with it, has stepped. It then waits
    for the other optimizers that stepped in the one before, so that what belongs to one iteration
    of the trainer stands in one record; at the latest until the run is measured again. The methods
    that end a step return the steps that are complete by that, in order, for publishing.
    """

    def __init__(self) -> None:
        self.step = OpenStep(sequence=1, begun_seconds=nan)
        self._ended: OpenStep | None = None
        """Has ended and is yet to be published."""
        self._last: OpenStep | None = None
        """Has ended, published or not; joint optimizers may still step by the same backward."""
        self._same_pass = False
        self._awaited: Collection[str] = ()
        self._companions: set[str] = set()
        self._known: set[str] = set()
        self._alone: dict[str, int] = {}
        """Steps of other optimizers since the run's last, by label."""
        self._longest: dict[str, int] = {}
        self._reaches_run = False
        """Another optimizer has stepped since the run's last step by such a backward."""
        self._reached_in = 0
        """Number of the last backward that has made gradients of the run."""
        self._first_sequence = 1
        """Sequence number of the first step since another optimizer took over."""
        self._longest_turn = 0
        """Steps that an optimizer made in the place of one that then came back."""
        self._in_turns = False
        self._pass = 0
        """Number of the current backward."""
        self._lone: dict[str, tuple[int, OpenStep]] = {}
        """By label: what would be a step, if that optimizer were the run's own; and its pass."""

    def of(self, watched: WatchedOptimizer) -> OpenStep:
        """Return the step to which gradients of an optimizer belong now."""
        label, last = watched.label, self._last
        joins = watched.role is not Role.SEPARATE and self._same_pass
        if joins and last is not None and label not in last.stepped:
            return last
        if not watched.of_run and self._ended is not None and label not in self._ended.stepped:
            return self._ended
        return self.step

    def is_published(self, step: OpenStep) -> bool:
        """Return whether nothing can be added to a step."""
        return step is not self.step and step is not self._ended

    def begin_pass(self) -> None:
        """Begin the next pass: a backward of the run starts."""
        self._pass += 1
        self._same_pass = False
        self.step.clipped.clear()

    def reaches_run(self) -> None:
        """Record that the backward of this pass has made gradients of the run."""
        self._reached_in = self._pass

    def gradients_change(self, labels: Collection[str] | None = None) -> None:
        """Mark what was measured so far as outdated: a backward starts.

        labels: of the optimizers whose gradients it can reach, if not all.
        """
        for step in (self.step, self._ended):
            if step is not None:
                step.measured.difference_update(step.measured if labels is None else labels)

    def run_ended(self, label: str, awaited: Collection[str]) -> list[OpenStep]:
        """End the step under way: an optimizer of the run has stepped.

        awaited: other optimizers of the same model that have yet to step.
        """
        complete = self.close_ended() if self._ended is not None else []
        step = self.step
        step.stepped.add(label)
        self.step = OpenStep(sequence=step.sequence + 1, begun_seconds=perf_counter())
        self._awaited = awaited
        self._reaches_run = False
        self._ended = self._last = step
        self._same_pass = True
        for other, count in self._alone.items():
            self._longest[other] = max(count, self._longest.get(other, 0))
        self._alone.clear()
        self._lone.clear()
        return complete + self._close_if_complete(step)

    def joint_ended(self, label: str) -> list[OpenStep]:
        """Record the step of another optimizer of the run by the same backward."""
        if (step := self._last) is not None:
            step.measured.discard(label)
            step.settled.discard(label)
            step.stepped.add(label)
            if step is self._ended:
                return self._close_if_complete(step)
        return []

    def other_ended(self, watched: WatchedOptimizer) -> list[OpenStep]:
        """Record the step of an optimizer that is not the run's.

        The first one is the first of an iteration. So one that steps for the first time after the
        record of its iteration was published is followed from the next iteration on. If the run
        has made steps without it before, it may be its successor.
        """
        label, step = watched.label, self.of(watched)
        step.measured.discard(label)
        step.settled.discard(label)
        if step is self.step:
            self._alone[label] = self._alone.get(label, 0) + 1
            self._reaches_run |= self._has_reached_run(label)
            if step.sequence > 2 and label not in self._known:
                self._lone[label] = self._pass, _as_own(step, watched)
        self.step.loss_outdated = self.step.losses > 0
        if step is self.step and step.sequence > 1 and label not in self._known:
            self._companions = {*self._companions, label}
        else:
            step.stepped.add(label)
        self._known.add(label)
        if step is self._ended and watched.role is Role.SEPARATE:
            return self._close_if_complete(step)
        return []

    def is_overtaken_by(self, label: str, trains_the_model: Callable[[], bool]) -> bool:
        """Return whether another optimizer trains on where those of the run have ceased to.

        One that the run has stepped without is known for that at its second step in a row, unless
        another model is trained through the run's (the actor of an actor and critic), or optimizers
        were found to take turns. trains_the_model: whether it holds parameters of the run's model.
        """
        alone = self._alone.get(label, 0)
        limit = max(ALONE_AT_MOST, 4 * self._longest.get(label, 0), 4 * self._longest_turn)
        if alone >= limit:
            return True
        succeeds = label in self._lone and not self._in_turns
        if not succeeds:
            return False
        reaches = self._reaches_run or self._has_reached_run(label)
        return not reaches or trains_the_model()

    def _has_reached_run(self, label: str) -> bool:
        """Return whether a backward since an optimizer's lone step has made gradients of the run.

        Before the first one only the last backward counts: those before it may be micro-batches
        that a predecessor has left over.
        """
        since = self._lone[label][0] if label in self._lone else self._pass - 1
        return self._reached_in > since

    def note_turn(self) -> None:
        """Record that the optimizer that was overtaken steps again: it had no successor."""
        self._in_turns = True
        turn = self.step.sequence - self._first_sequence
        self._longest_turn = max(turn, self._longest_turn)

    def has_lone_step(self, label: str) -> bool:
        """Return whether an optimizer made a step of its own that counts if it takes over."""
        return label in self._lone

    def restart_with(self, label: str, labels: Mapping[str, str]) -> list[OpenStep]:
        """Make the step under way one of the optimizer that was `label` and is now the first.

        labels: the new ones of all that train its model, by those that they had. A step of its own
        before that one, if it has made one, is the last of those returned.
        """
        complete = self.close_ended()
        lone = self._lone_step(label, labels)
        if lone is not None:
            self.step.sequence += 1
            self.step.begun_seconds = perf_counter()
        self.step.totals.clear()
        self.step.rows.clear()
        self.step.measured.clear()
        self._first_sequence = self.step.sequence - (lone is not None)
        self._last, self._awaited = None, ()
        self._reaches_run, self._reached_in = False, 0
        for kept in (self._companions, self._known, self._alone, self._longest):
            kept.clear()
        self._lone.clear()
        return complete if lone is None else [*complete, lone]

    def _lone_step(self, label: str, labels: Mapping[str, str]) -> OpenStep | None:
        """Return the step that `label` made, with the parts of those that made it together."""
        if label not in self._lone:
            return None
        own_pass, step = self._lone.pop(label)
        for other, (in_pass, part) in self._lone.items():
            if in_pass == own_pass and other in labels:
                new = labels[other]
                step.stepped.add(new)
                if "" in part.totals:
                    step.totals[new] = part.totals[""]
                if "" in part.rows:
                    step.rows[new] = part.rows[""]
        return step

    def close_ended(self) -> list[OpenStep]:
        """Close the step that has ended, if any, whether or not other optimizers have followed."""
        if self._ended is None:
            return []
        step, self._ended = self._ended, None
        self._companions = step.stepped
        return [step]

    def _close_if_complete(self, step: OpenStep) -> list[OpenStep]:
        if self._companions <= step.stepped and step.stepped.issuperset(self._awaited):
            return self.close_ended()
        return []


def _as_own(step: OpenStep, watched: WatchedOptimizer) -> OpenStep:
    """Return what an optimizer did in a step as if it were the first one."""
    label, scalars = watched.label, {**step.scalars, "skipped": 0.0, **watched.scalars}
    scalars["step_seconds"] = perf_counter() - step.begun_seconds
    own = replace(
        step,
        scalars=scalars,
        totals={"": step.totals[label]} if label in step.totals else {},
        rows={"": step.rows[label]} if label in step.rows else {},
        measured=set(),
        settled=set(),
        stepped={""},
        clipped=set(),
    )
    own.keep_loss_of_successor(watched.backwards_at_most())
    return own


_FRAMEWORKS: dict[tuple[str, str], Callable[[Any], int]] = {
    ("transformers.trainer", "train"): lambda trainer: trainer.state.global_step,
    ("lightning.pytorch.trainer.trainer", "fit"): lambda trainer: trainer.global_step,
    ("pytorch_lightning.trainer.trainer", "fit"): lambda trainer: trainer.global_step,
    # It counts a step as it begins.
    ("torchtitan.trainer", "train"): lambda trainer: trainer.step - 1,
    ("torchtitan.train", "train"): lambda trainer: trainer.step - 1,
}
"""By module and name of the method that trains: how many steps its trainer has completed."""

_FRAMES_AT_MOST = 200


STATE_KNOWN_STEP = 4
"""When a schedule has shown how far it is, and an optimizer whether it keeps state."""
_LOST_STEPS = 32
"""Steps in a row, each by a new optimizer, after which it is seen whether these keep state."""


class TrainerStep:
    """Knows by how much the trainer's number is ahead of our sequence number.

    resumed_without_state: by how much a schedule, or a framework's trainer, is ahead at step 4,
    where the optimizer keeps state and began without any; else 0. schedule_behind: by how much a
    schedule is behind the optimizer's state there; else 0.
    """

    def __init__(self) -> None:
        self.lead = 0
        self.resumed_without_state = 0
        self.schedule_behind = 0
        self._ahead = 0
        self._of_state: int | None = None
        self._of_schedule: int | None = None
        """By how much the optimizer's state, and the schedule that is furthest, are ahead of us."""
        self.may_lose_state = False
        """The next look at an optimizer's state shows whether those before it had any to lose."""
        self._new_steps = 0
        """Consecutive steps that were each the first one of an optimizer without state."""
        self._newest: weakref.ref[Optimizer] | None = None
        self._trained_first: TensorRef | None = None
        """The first parameter of the first of these optimizers."""
        self._began_empty: int | None = None
        """`id` of the first optimizer, where it had no state before its first step; else 0."""
        self._observed = False
        self._completed: Callable[[], int | None] | None = None
        self._optimizer = 0
        self._state = 0
        """`id` of the optimizer, and of its state, which is another one once it was loaded."""
        self._arriving: _Arriving | None = None
        self._schedule = _Schedule()

    def observe(self, step: int, sequence: int) -> None:
        """Use the trainer's number of step `sequence`, and count on from it."""
        self.lead, self._observed = step - sequence, True

    def inspect(self, optimizer: Optimizer, sequence: int) -> None:
        """Learn the number of step `sequence`, which `optimizer` is about to make."""
        # By references: an optimizer that is gone may leave its `id` to the next.
        if optimizer.state or (self._newest is not None and self._newest() is optimizer):
            self._new_steps = 0
        else:
            self._new_steps, self._newest = self._new_steps + 1, weakref.ref(optimizer)
        self.may_lose_state = False
        if self._new_steps == 1 or (self._new_steps and self._new_steps % _LOST_STEPS == 0):
            self._look_at_weights(optimizer)
        if sequence <= STATE_KNOWN_STEP:
            self._look_at_state(optimizer, sequence)
        if self._observed:
            return
        if id(optimizer) != self._optimizer:
            self._optimizer = id(optimizer)
            self._completed = _framework_on_stack()
        completed = None if self._completed is None else self._completed()
        if completed is not None:
            self.lead = self._ahead = completed + 1 - sequence
            return
        if self._arriving is not None and (value := self._arriving.value()) is not None:
            self._learn(value, self._arriving.sequence)
            self._arriving = None
        if id(optimizer.state) == self._state:
            return
        self._state = id(optimizer.state)
        in_state = _steps_in_state(optimizer)
        if isinstance(in_state, torch.Tensor):
            self._arriving = _Arriving.of(in_state, sequence)
        elif in_state is not None:
            self._learn(in_state, sequence)

    def lost_steps(self, optimizer: Optimizer) -> int:
        """Return how many steps in a row have left state behind, as `optimizer`'s last one has."""
        return self._new_steps if _keeps_state(optimizer) else 0

    def completed_by_engine(self, completed: int, sequence: int) -> None:
        """Learn from an engine, before step `sequence`, how many it has completed."""
        if not self._observed:
            self.lead = completed + 1 - sequence

    def scheduler_stepped(self, last_epoch: object, sequence: int) -> None:
        """Learn from a scheduler of the optimizer, stepped after step `sequence`."""
        lead = self._schedule.lead(last_epoch, sequence)
        self._ahead = max(self._ahead, lead or 0)
        if lead is not None:
            self._of_schedule = lead if self._of_schedule is None else max(lead, self._of_schedule)
        if lead is not None and not self._observed and self.lead == 0:
            self.lead = lead

    def _look_at_weights(self, optimizer: Optimizer) -> None:
        """Begin to count again where the model is another one, as a client's or a task's copy."""
        first = next(iter(optimizer_parameters(optimizer)), None)
        known = None if self._trained_first is None else self._trained_first()
        if self._new_steps > 1 and known is not None and known is first:
            self.may_lose_state = True
            return
        self._new_steps = 1
        self._trained_first = None if first is None else TensorRef(first)

    def _look_at_state(self, optimizer: Optimizer, sequence: int) -> None:
        if self._began_empty is None:
            empty = sequence == 1 and not _keeps_state(optimizer)
            self._began_empty = id(optimizer) if empty else 0
        elif sequence == STATE_KNOWN_STEP and self._began_empty == id(optimizer):
            self.resumed_without_state = self._ahead if _keeps_state(optimizer) else 0
        of_state, of_schedule = self._of_state, self._of_schedule
        if sequence == STATE_KNOWN_STEP and of_state is not None and of_schedule is not None:
            self.schedule_behind = of_state - of_schedule

    def _learn(self, completed: float, sequence: int) -> None:
        if completed >= 1:
            self.lead = self._of_state = int(completed) + 1 - sequence


class _Schedule:
    """Detects whether a scheduler is stepped once after each step of the optimizer."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._irregular = False

    def lead(self, last_epoch: object, sequence: int) -> int | None:
        """Return by how much it is ahead, once two steps in a row have agreed."""
        if self._irregular or not isinstance(last_epoch, int) or sequence < 1:
            return None
        last, self._last = self._last, (sequence, last_epoch)
        if last is None:
            return None
        if last[0] == sequence:
            self._irregular = True
        agree = (sequence - last[0], last_epoch - last[1]) == (1, 1)
        return last_epoch - sequence if agree else None


@dataclass(frozen=True)
class _Arriving:
    """A number on its way from a device, for which nothing waits."""

    host: torch.Tensor
    """float64, NaN until the number has arrived."""
    sequence: int

    @classmethod
    def of(cls, value: torch.Tensor, sequence: int) -> "_Arriving":
        host = accelerator.pinned_zeros((1,), value.device).view(torch.float64).fill_(nan)
        accelerator.copy_to_host(host, value.reshape(1))
        return cls(host, sequence)

    def value(self) -> float | None:
        arrived = float(self.host.item())
        return None if isnan(arrived) else arrived


def _framework_on_stack() -> Callable[[], int | None] | None:
    """Return the step counter of the framework trainer on the stack; None when there is none."""
    if all(module not in sys.modules for module, _ in _FRAMEWORKS):
        return None
    for frame in _frames():
        module = str(frame.f_globals.get("__name__"))
        if (completed := _FRAMEWORKS.get((module, frame.f_code.co_name))) is not None:
            # Of no other frame: `f_locals` keeps what is in there alive as long as the frame.
            trainer = frame.f_locals.get("self")
            return None if trainer is None else _counter(trainer, completed)
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_AT_MOST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _counter(trainer: object, completed: Callable[[Any], int]) -> Callable[[], int | None]:
    reference = weakref.ref(trainer)

    def count() -> int | None:
        alive = reference()
        try:
            return int(completed(alive))
        except (AttributeError, TypeError, ValueError):
            return None  # also once the trainer is gone

    return count


def _keeps_state(optimizer: Optimizer) -> bool:
    """Return whether there is any state of any parameter."""
    return any(
        isinstance(state, dict) and any(value is not None for value in state.values())
        for state in optimizer.state.values()
    )


def _steps_in_state(optimizer: Optimizer) -> Scalar | None:
    """Return the most steps that the state of any parameter, or any group, has counted.

    A group without any state may count from 1 on, and so has made no step at 1.
    """
    counted = [state.get("step") for state in optimizer.state.values() if isinstance(state, dict)]
    for number in (group.get("step") for group in optimizer.param_groups):
        if optimizer.state or not (isinstance(number, int) and number == 1):
            counted.append(number)
    found = [scalar for value in counted if (scalar := scalar_of(value)) is not None]
    on_device = [value for value in found if isinstance(value, torch.Tensor)]
    if not on_device:
        return max((float(value) for value in found), default=None)
    same = [value for value in on_device if value.device == on_device[0].device]
    return torch.stack(same).amax().to(torch.float64)
