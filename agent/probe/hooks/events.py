"""What the hooks tell the probe. Each call is made through the guard."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer


class Events(Protocol):
    """The moments of a training step, in the order in which they come."""

    def autocast_entered(self, dtype: torch.dtype) -> None:
        """Hear that autocast to `dtype` was switched on."""

    def loss_scaled(self, scaler: GradScaler, outputs: object) -> None:
        """Hear that an enabled `scaler.scale(outputs)` begins."""

    def backward_begins(self, tensors: object, gradients: object) -> None:
        """Hear that an outermost backward begins from `tensors`, seeded with `gradients`."""

    def backward_ended(self) -> None:
        """Hear that it is over, whether it came to its end or raised."""

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Hear that `scaler.unscale_(optimizer)` has divided the gradients by the loss scale."""

    def clipping(self, parameters: list[torch.Tensor]) -> None:
        """Hear that the gradients of `parameters` are about to be clipped."""

    def clipping_to(self, max_norm: object, total_norm: object) -> None:
        """Hear that they have norm `total_norm` and will be scaled down to `max_norm`."""

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Hear that an enabled `scaler.step(optimizer)` begins."""

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Hear that it returned; the optimizer was stepped or skipped."""

    def optimizer_step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Hear that `optimizer.step()` begins; a closure has yet to compute the gradients."""

    def optimizer_step_ended(self, optimizer: Optimizer) -> None:
        """Hear that `optimizer.step()` is about to return."""

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Hear that a process group, None for all of them, is about to be destroyed."""
