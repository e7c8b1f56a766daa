"""What became of an update: agreed on by the ranks, and written down."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from mp_agent.catalog.guard import Action
from mp_agent.probe import accelerator
from mp_agent.probe.guard.loss_scales import ScaleChange
from mp_agent.probe.guard.verdict import UpdateVerdict, host_lag_steps
from mp_agent.probe.meeting import Meeting, OwnGroup, reduced
from mp_agent.ring.interruptions import pass_on


class Agreement:
    """Adds numbers up over the ranks of a process group, the job's own unless one is given.

    The ranks meet before the first sum, and do so again when the job makes its groups again. Sums
    are made in a gloo group of the guard's own, which ends with the job's. Where the job has no
    gloo they are part of the stream of its own collectives: no other communicator may run on a
    GPU at the same time.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        group: Callable[[], dist.ProcessGroup | None] = lambda: None,
    ) -> None:
        """Meet no other rank yet.

        settings: what decides, by name. group: returns the group; None for the job's own.
        """
        self._settings = settings
        self._group = group
        self._met_in: dist.ProcessGroup | None = None
        """The job's own group when the ranks met."""
        self._meeting: Meeting | None = None
        self._own: OwnGroup | None = None
        self._sent: torch.Tensor | None = None

    @property
    def ranks(self) -> int:
        """How many ranks agree: 1 without a process group."""
        return 1 if self._meeting is None else len(self._meeting.ranks)

    def meet(self, device: torch.device) -> bool:
        """Meet the other ranks if that is due; return whether it was. device: of the gradients.

        Raises NotMet where ranks are missing or decide by other settings, RuntimeError where they
        cannot be reached.
        """
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is self._met_in:
            return False
        self.release()
        self._met_in = world
        if (meeting := Meeting.of("the guard", self._group())) is None:
            return False
        place = "the host" if accelerator.is_on_host(device) else "a device"
        meeting.join({**self._settings, "the place of decisions": place})
        if _has_gloo(device, self._group()):
            self._own = meeting.connect()
        self._meeting = meeting
        return True

    def sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sums over all ranks, on the same device.

        Raises RuntimeError where the others are not there in time: within the time-out of a wait,
        or on a GPU within that of the job's group.
        """
        if self._meeting is None:
            return numbers
        sent = self._sent = numbers.to("cpu" if self._own else numbers.device, copy=True)
        if self._own is None:
            dist.all_reduce(sent, group=self._group())
        else:
            reduced(self._own, sent, dist.ReduceOp.SUM).wait()
        return sent.to(numbers.device, copy=True)

    def all_agree(self) -> bool:
        """Return whether all ranks have the sums: they may fail on one rank and not on another."""
        return self._meeting is None or self._meeting.all_agree(True)

    def decline(self) -> None:
        """Have no other rank act on the sums, which this one does not have; then leave the ranks.

        Where the store cannot be reached, the others give this rank up after a wait.
        """
        try:
            if self._meeting is not None:
                self._meeting.all_agree(False)
        except Exception as error:
            pass_on(error)
        finally:
            self.release()

    def leave(self) -> None:
        """Release the groups, which are about to end: the ranks meet again in those made next."""
        self.release()
        self._met_in = None

    def release(self) -> None:
        """Release the own group, and the store."""
        self._meeting = self._own = None
        self._sent = None


def _has_gloo(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Return whether a group of gloo's serves as well as the job's own for what is on `device`."""
    backends = dist.get_backend_config(group)
    by_device = dict(pair.split(":") for pair in backends.split(",") if ":" in pair)
    return dist.is_gloo_available() and by_device.get(device.type, "gloo") in ("gloo", "mpi")


class UpdateOutcome(NamedTuple):
    """A verdict, read; the fields are those of `UpdateVerdict`."""

    norm: float
    limit: float
    is_nonfinite: bool
    is_scaler_skip: bool
    is_spike: bool
    is_skipped: bool
    coefficient: float
    is_none_left: bool
    is_last_skip: bool
    is_failed: bool
    is_rate_held: bool = False

    @property
    def is_trouble(self) -> bool:
        """Whether the update was, or should have been, anything but ordinary."""
        return self.is_nonfinite or self.is_scaler_skip or self.is_spike or self.is_rate_held

    @property
    def is_clipped(self) -> bool:
        """Whether the guard scales the gradients down."""
        return self.coefficient != 1.0


class Outcomes:
    """The verdicts on one optimizer's updates on their way to the host, in order."""

    def __init__(self) -> None:
        self._copies: deque[accelerator.HostCopy] = deque()

    def add(self, verdict: UpdateVerdict) -> list[UpdateOutcome]:
        """Take the next verdict; return those that the slower policies get to see now."""
        numbers = torch.stack([value.to(torch.float64) for value in verdict])
        self._copies.append(accelerator.HostCopy(numbers))
        lag = host_lag_steps(numbers.device)
        due: list[UpdateOutcome] = []
        while len(self._copies) > lag:
            due.append(_read(self._copies.popleft().numbers()))
        return due


def _read(numbers: list[float]) -> UpdateOutcome:
    norm, limit, nonfinite, scaler_skip, spike, skipped, coefficient = numbers[:7]
    none_left, last_skip, failed, rate_held = numbers[7:]
    return UpdateOutcome(
        norm=norm,
        limit=limit,
        is_nonfinite=bool(nonfinite),
        is_scaler_skip=bool(scaler_skip),
        is_spike=bool(spike),
        is_skipped=bool(skipped),
        coefficient=coefficient,
        is_none_left=bool(none_left),
        is_last_skip=bool(last_skip),
        is_failed=bool(failed),
        is_rate_held=bool(rate_held),
    )


log = logging.getLogger("mp_agent")

_LINES_AT_MOST = 20
"""Most log lines of each action; all actions are counted."""


class ActionLog:
    """Logs actions as they come to be known."""

    def __init__(self, *, dry_run: bool) -> None:
        self._prefix = "guard (dry run)" if dry_run else "guard"
        self._lines: Counter[Action] = Counter()
        self._changes: dict[Action, deque[tuple[int, accelerator.HostCopy]]] = {}
        """Changes of loss scales, with their steps, on their way to the host."""

    def updated(self, outcome: UpdateOutcome, step: int) -> None:
        """Log what was done with an update."""
        if outcome.is_skipped:
            cause = "gradients are not finite" if outcome.is_nonfinite else _spike(outcome)
            if outcome.is_scaler_skip:
                cause = "the GradScaler of another rank skips it"
            self._write(Action.SKIP_UPDATE, step, f"the update is skipped: {cause}")
        elif outcome.is_clipped:
            what = f"gradients are multiplied by {outcome.coefficient:.3g}"
            self._write(Action.CLIP_GRADIENTS, step, f"{what}: {_spike(outcome)}")
        if outcome.is_rate_held:
            text = "a learning rate has jumped: the update is made with the highest one before"
            self._write(Action.HOLD_LEARNING_RATE, step, text)
        if outcome.is_none_left:
            self._write(Action.NONE_LEFT, step, "nothing is done: it was done too often lately")

    def acted(self, action: Action, step: int) -> None:
        """Log what one of the slower policies does."""
        if action is not Action.NONE_LEFT:
            self._write(action, step, f"{action.value.replace('_', ' ')}, since trouble repeats")

    def scale_changed(self, change: ScaleChange, step: int) -> None:
        """Log what was done with a loss scale; from a device some steps later."""
        if self._lines[change.action] >= _LINES_AT_MOST:
            self._changes.pop(change.action, None)
            return
        numbers = torch.stack([value.to(torch.float64).reshape(()) for value in change[1:]])
        coming = self._changes.setdefault(change.action, deque())
        coming.append((step, accelerator.HostCopy(numbers)))
        lag = host_lag_steps(numbers.device)
        while len(coming) > lag:
            then, copy = coming.popleft()
            is_done, is_none_left, before, after = copy.numbers()
            if is_done:
                text = f"the loss scale is set to {after:g}, from {before:g}"
                self._write(change.action, then, text)
            if is_none_left:
                text = f"the loss scale stays {before:g}: it was changed too often lately"
                self._write(Action.NONE_LEFT, then, text)

    def _write(self, action: Action, step: int, text: str) -> None:
        self._lines[action] += 1
        if self._lines[action] > _LINES_AT_MOST or not _is_first_rank():
            return
        end = "; further ones are only counted" if self._lines[action] == _LINES_AT_MOST else ""
        log.warning("%s, step %d: %s%s", self._prefix, step, text, end)


def _spike(outcome: UpdateOutcome) -> str:
    return f"the gradient norm {outcome.norm:.4g} is above {outcome.limit:.4g}"


def _is_first_rank() -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return True
    return dist.get_rank() == 0
