"""The trainer's own number of a step, which after a resume is ahead of ours, found without it.

What `observe(step=…)` gives comes first, then the trainer of a framework, then the optimizer's
state, then a learning-rate scheduler that is stepped once per step.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isnan, nan
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.probe import accelerator
from mp_agent.probe.scalars import Scalar, scalar_of

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


class TrainerStep:
    """Knows by how much the trainer's number is ahead of our sequence number."""

    def __init__(self) -> None:
        self.lead = 0
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
        if self._observed:
            return
        if id(optimizer) != self._optimizer:
            self._optimizer = id(optimizer)
            self._completed = _framework_on_stack()
        completed = None if self._completed is None else self._completed()
        if completed is not None:
            self.lead = completed + 1 - sequence
            return
        self._inspect_state(optimizer, sequence)

    def completed_by_engine(self, completed: int, sequence: int) -> None:
        """Learn from an engine, before step `sequence`, how many it has completed."""
        if not self._observed:
            self.lead = completed + 1 - sequence

    def scheduler_stepped(self, last_epoch: object, sequence: int) -> None:
        """Learn from a scheduler of the optimizer, stepped after step `sequence`."""
        lead = self._schedule.lead(last_epoch, sequence)
        if lead is not None and not self._observed and self.lead == 0:
            self.lead = lead

    def _inspect_state(self, optimizer: Optimizer, sequence: int) -> None:
        if self._arriving is not None and (value := self._arriving.value()) is not None:
            self._learn(value, self._arriving.sequence)
            self._arriving = None
        if id(optimizer.state) == self._state:
            return
        self._state = id(optimizer.state)
        completed = _steps_in_state(optimizer)
        if isinstance(completed, torch.Tensor):
            self._arriving = _Arriving.of(completed, sequence)
        elif completed is not None:
            self._learn(completed, sequence)

    def _learn(self, completed: float, sequence: int) -> None:
        if completed >= 1:
            self.lead = int(completed) + 1 - sequence


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


def _steps_in_state(optimizer: Optimizer) -> Scalar | None:
    """Return the most steps that the state of any parameter, or any group, has counted."""
    counted = [state.get("step") for state in optimizer.state.values() if isinstance(state, dict)]
    counted += [group.get("step") for group in optimizer.param_groups]
    found = [scalar for value in counted if (scalar := scalar_of(value)) is not None]
    on_device = [value for value in found if isinstance(value, torch.Tensor)]
    if not on_device:
        return max((float(value) for value in found), default=None)
    same = [value for value in on_device if value.device == on_device[0].device]
    return torch.stack(same).amax().to(torch.float64)
