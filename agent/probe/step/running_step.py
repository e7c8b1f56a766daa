"""Distinguishes a step that is still running, and runs the script's code, from one that raised."""

import sys
from types import FrameType

from torch.optim import Optimizer


def running_step(identity: int) -> Optimizer | None:
    """Return the optimizer of that `id` if this thread is within its step; None if it is not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is STEP:
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer) and id(optimizer) == identity:
                return optimizer
        frame = frame.f_back
    return None


def _nothing(optimizer: Optimizer) -> None:
    """Do nothing, in place of a step."""


STEP = Optimizer.profile_hook_step(_nothing).__code__
"""What torch puts around the step of every optimizer; all hooks on steps run within."""
