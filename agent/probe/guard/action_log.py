"""Log lines of what the guard does, on rank 0; the same on all ranks."""

import logging
from collections import Counter, deque

import torch
import torch.distributed as dist

from mp_agent.catalog.guard import Action
from mp_agent.probe import accelerator
from mp_agent.probe.guard.decision.host_lag import host_lag_steps
from mp_agent.probe.guard.decision.outcome import UpdateOutcome
from mp_agent.probe.guard.policies.loss_scales import ScaleChange

log = logging.getLogger("mp_agent")

_LINES_AT_MOST = 20
"""Of each action; all of them are counted."""


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
