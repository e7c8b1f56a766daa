"""Events that the hooks report to the tracker. Each call is made through the shield."""

from collections.abc import Hashable, Sequence
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
    """Events of a training step, about in the order in which they occur."""

    @property
    def between_steps(self) -> bool:
        """Whether training has begun and neither a backward nor an optimizer is running."""

    def autocast_entered(self, dtype: torch.dtype, with_gradients: bool) -> None:
        """Called when autocast to `dtype` is switched on; with gradients, as for training."""

    def loss_scaled(self, scaler: GradScaler, outputs: object, scaled: object) -> None:
        """Called when an enabled `scaler.scale(outputs)` has computed `scaled`."""

    def backward_begins(
        self, roots: object, seeds: object, inputs: Sequence[torch.Tensor] | None
    ) -> None:
        """Called when an outermost backward starts from `roots`, seeded with gradients `seeds`.

        inputs: the only tensors that get a gradient; None for all leaves.
        """

    def backward_ended(self, *, raised: bool = False) -> None:
        """Called when an outermost backward has returned or raised."""

    def gradients_cleared(self, owner: Optimizer | nn.Module) -> None:
        """Called when an outermost `owner.zero_grad()` starts."""

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Called when `scaler.unscale_(optimizer)` has divided the gradients by the loss scale."""

    def clipping(self, parameters: list[torch.Tensor]) -> None:
        """Called when the gradients of `parameters` are about to be clipped."""

    def clipping_to(
        self, max_norm: object, total_norm: object, *, of_all_ranks: bool = False
    ) -> None:
        """Called when their norm `total_norm` is known; they will be scaled down to `max_norm`.

        None of both where each value has been clipped.
        """

    def clipping_compiled(self) -> None:
        """Called when clipping is being compiled: when it runs, no event will be reported."""

    def scaler_step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Called when an enabled `scaler.step(optimizer)` starts."""

    def scaler_step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Called when it has returned; the optimizer was stepped or skipped."""

    def scaler_lets_step(self) -> None:
        """Called when a scaler would step what stands for an optimizer, which steps later."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Called when an optimizer has been constructed, and has its parameters."""

    def optimizer_step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Called when `optimizer.step()` starts; a closure has yet to compute the gradients."""

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Called when the optimizer calls its closure, within its step."""

    def closure_returned(self, optimizer: Optimizer) -> None:
        """Called when the closure has returned, with gradients computed."""

    def closure_raised(self, optimizer: Optimizer) -> None:
        """Called when the closure has raised; the optimizer's step most likely does, too."""

    def optimizer_step_ended(self, optimizer: Optimizer) -> None:
        """Called when `optimizer.step()` is about to return."""

    def scheduler_stepped(self, scheduler: LRScheduler) -> None:
        """Called when a learning-rate scheduler has been stepped."""

    def not_training(self, stepping: bool) -> None:
        """Called with True before optimizer steps that are not training, with False after them."""

    def engine_made(self, engine: Engine) -> None:
        """Called when a framework's engine exists that steps its optimizer itself."""

    def engine_never_steps(self) -> None:
        """Called once there were many backwards of an engine that has not stepped."""

    def engine_backward_begins(self, loss: Scalar) -> None:
        """Called when an engine starts the backward of `loss`, its part of the step's."""

    def engine_scaled(self, loss: Scalar, scaled: object) -> None:
        """Called when an engine has scaled `loss`, its part of the step's, for a later backward."""

    def loss_divided(self, parts: int) -> None:
        """Called when an engine divides the gradients of the current backward by `parts`."""

    def gradients_multiplied(self, factor: object) -> None:
        """Called when an engine multiplies all gradients of the step, hence its loss."""

    def micro_batch_begins(self, per_step: int, *, last: bool) -> None:
        """Called before a backward of which a framework steps after `per_step`; `last`: at once."""

    def reduction_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        """Called when a rank's own `gradients`, as they are now, are about to be reduced."""

    def gradients_kept(self) -> None:
        """Called when an engine has added the gradients to those of earlier backwards."""

    def schedule_runs(self, begins: bool) -> None:
        """Called with True when a pipeline schedule begins to run, with False when it has run."""

    def schedule_ended(self, loss: Scalar) -> None:
        """Called when its backwards are over: its gradients are those of `loss`."""

    def unsupported(self, feature: str) -> None:
        """Called when a feature of the script is seen that is not measured."""

    def engine_step_begins(self, engine: Engine) -> None:
        """Called when an engine is about to unscale and clip its gradients, and to step."""

    def engine_step_raised(self) -> None:
        """Called when this step has raised."""

    def engine_step_ended(self, engine: Engine) -> None:
        """Called when an engine has stepped, or skipped the step."""

    def mode_changed(self, module: nn.Module, training: bool, before: bool) -> None:
        """Called when an outermost `module.train(training)` has returned; `before`: its mode."""

    def evaluation(self, sign: str, begins: bool) -> None:
        """Called when a sign of evaluation has appeared, or disappeared."""

    def batch_loads(self, iterator: object) -> None:
        """Called when the iterator of a data loader is about to return a batch to train on."""

    def random_numbers_set(self, seeded: bool) -> None:
        """Called between steps when the seed of random numbers was set; False: a state of them."""

    def state_loaded(self, module: nn.Module, tensors: int, fitting: int) -> None:
        """Called when a module was given a state of so many tensors, of which some have fitted."""

    def saving(self, begins: bool) -> None:
        """Called with True when a checkpoint is about to be written, with False afterwards."""

    def scripting(self) -> None:
        """Called when TorchScript is about to compile a module or a function."""

    def graph_capture_begins(self, graph: Hashable) -> None:
        """Called when operations are about to be recorded into a CUDA graph."""

    def graph_capture_ended(self) -> None:
        """Called when they have been recorded."""

    def graph_replayed(self, graph: Hashable) -> None:
        """Called when a CUDA graph is about to be replayed."""

    def group_ends(self, group: dist.ProcessGroup | None) -> None:
        """Called when a process group, None for all of them, is about to be destroyed."""
