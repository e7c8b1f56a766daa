"""What the hooks tell the probe. Each call is made through the guard."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mp_agent.probe.optimizers.engine import Engine
from mp_agent.probe.scalars import Scalar


class Events(Protocol):
    """The moments of a training step, in the order in which they come."""

    @property
    def between_steps(self) -> bool:
        """Whether training has begun and stands between an optimizer's step and a backward."""

    def autocast_entered(self, dtype: torch.dtype) -> None:
        """Hear that autocast to `dtype` was switched on."""

    def loss_scaled(self, scaler: GradScaler, outputs: object, scaled: object) -> None:
        """Note that an enabled `scaler.scale(outputs)` returns `scaled`."""

    def backward_begins(
        self, roots: object, seeds: object, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """Note that an outermost backward begins from `roots`, seeded with the gradients `seeds`.

        inputs: the only tensors that get a gradient, where that is said.
        """

    def backward_ended(self) -> None:
        """Hear that it is over, whether it came to its end or raised."""

    def gradients_cleared(self, owner: Optimizer | nn.Module) -> None:
        """Note that an outermost `owner.zero_grad()` begins."""

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Hear that `scaler.unscale_(optimizer)` has divided the gradients by the loss scale."""

    def clipping(self, parameters: list[torch.Tensor]) -> None:
        """Hear that the gradients of `parameters` are about to be clipped."""

    def clipping_to(self, max_norm: object, total_norm: object) -> None:
        """Hear that they have norm `total_norm` and will be scaled down to `max_norm`."""

    def clipping_compiled(self) -> None:
        """Note that clipping is being compiled: when it runs, nothing will be noted."""

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Hear that an enabled `scaler.step(optimizer)` begins."""

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Hear that it returned; the optimizer was stepped or skipped."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Note that an optimizer was made, and has its parameters."""

    def optimizer_step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Hear that `optimizer.step()` begins; a closure has yet to compute the gradients."""

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Note that the optimizer calls its closure, within its step."""

    def closure_returned(self, optimizer: Optimizer) -> None:
        """Note that the closure has computed gradients."""

    def closure_raised(self, optimizer: Optimizer) -> None:
        """Note that the closure raised; the optimizer's step most likely does, too."""

    def optimizer_step_ended(self, optimizer: Optimizer) -> None:
        """Hear that `optimizer.step()` is about to return."""

    def scheduler_stepped(self, scheduler: LRScheduler) -> None:
        """Note that a learning-rate scheduler has been stepped."""

    def not_training(self, stepping: bool) -> None:
        """Note that what optimizers do from now on is no step of training; False: that it is."""

    def engine_made(self, engine: Engine) -> None:
        """Note that a framework's engine steps its optimizer by itself from now on."""

    def engine_backward_begins(self, loss: Scalar) -> None:
        """Note that an engine begins the backward of `loss`, its part of the step's."""

    def engine_scaled(self, loss: Scalar, scaled: object) -> None:
        """Note that an engine has scaled `loss`, its part of the step's, for a later backward."""

    def loss_divided(self, parts: int) -> None:
        """Note that an engine divides the gradients of the backward under way by `parts`."""

    def engine_step_begins(self, engine: Engine) -> None:
        """Note that an engine is about to unscale and clip its gradients, and to step."""

    def engine_step_raised(self) -> None:
        """Note that this step raised."""

    def engine_step_ended(self, engine: Engine) -> None:
        """Note that an engine has stepped, or skipped the step."""

    def mode_changed(self, module: nn.Module, training: bool) -> None:
        """Note that an outermost `module.train(training)` has returned."""

    def evaluation(self, sign: str, begins: bool) -> None:
        """Note that a sign of evaluation has appeared, or vanished."""

    def saving(self, begins: bool) -> None:
        """Note that a checkpoint begins to be written; False: that it is written."""

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Hear that a process group, None for all of them, is about to be destroyed."""
