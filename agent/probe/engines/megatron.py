"""Reads Megatron's optimizers as they step, and the losses of its schedules.

The losses that Megatron's schedules run backwards from.
A schedule divides each loss by the number of micro-batches, may free it before its backward, and
multiplies it by the loss scale just before. So its value is taken as the forward pass returns it.
"""

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.probe.engines.megatron_gradients import leaves_of, torch_optimizers
from mp_agent.probe.engines.megatron_plan import make_plan
from mp_agent.probe.optimizers.engine import EnginePlan, EngineResult, EngineStep
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of


class ScheduledLosses:
    """Losses between the forward pass that made them and their backward, a few of a pipeline."""

    def __init__(self) -> None:
        self._losses: dict[int, tuple[weakref.ref[torch.Tensor], Scalar]] = {}

    def made(self, output: object) -> None:
        """Note what a forward pass has returned: a loss, or the output of an earlier stage."""
        tensor = first_of(output)
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
            return
        self._losses = {key: each for key, each in self._losses.items() if each[0]() is not None}
        if (loss := snapshot_of(tensor)) is not None:
            self._losses[id(tensor)] = weakref.ref(tensor), loss

    def taken(self, output: object, gradient: object) -> Scalar | None:
        """Return the loss that a backward is about to start from; None of an earlier stage.

        gradient: of the output, which has one on an earlier stage.
        """
        tensor = first_of(output)
        found = self._losses.pop(id(tensor), None)
        if first_of(gradient) is not None or not getattr(tensor, "requires_grad", False):
            return None
        if found is not None and found[0]() is tensor:
            return found[1]
        return scalar_of(tensor)


def first_of(value: Any) -> object:
    """Return the first of a list, or what is none."""
    if isinstance(value, list):
        return value[0] if value else None
    return value


def multiplied_by(wrapper: Any, factor: object) -> object:
    """Return by what a step's loss is to be multiplied where its gradients are by `factor`.

    With a loss per token, gradients are summed over the ranks that reduce them and then divided by
    the tokens of all; the run's loss is the mean over these ranks.
    """
    if not getattr(getattr(wrapper, "config", None), "calculate_per_token_loss", False):
        return factor
    scalar, group = scalar_of(factor), getattr(wrapper, "dp_cp_group", None)
    if scalar is None or group is None:
        return factor
    return scalar * torch.distributed.get_world_size(group)


class OptimizerReader:
    """Implements `optimizers.engine.OwningEngine` for a `MegatronOptimizer`, held weakly."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.result: object = None
        """What its `step` has returned: success, norm before clipping, number of zeros."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The first optimizer that is stepped within it."""
        return next(iter(torch_optimizers(self._optimizer())), None)

    @property
    def scaler_name(self) -> str:
        """Megatron's own scaler; empty without one."""
        scaler = self._scaler()
        return "" if scaler is None else type(scaler).__name__

    def make_plan(self, label: str) -> EnginePlan:
        """Return what to measure of the optimizer's model."""
        return make_plan(self._optimizer(), label)

    def begin(self) -> EngineStep:
        """Return the loss scale in force, by which the gradients are multiplied."""
        scale = self._scale()
        return EngineStep(loss_scale=scale, gradient_scale=scale, completed=None)

    def end(self) -> EngineResult:
        """Return whether the step was skipped, and the clipping that it did."""
        success, norm = _outcome(self.result)
        limit = getattr(getattr(self._optimizer(), "config", None), "clip_grad", None)
        clips = norm is not None and isinstance(limit, int | float) and limit > 0
        return EngineResult(
            skipped=None if success is None else not success,
            clip_max_norm=float(limit) if clips and limit else None,
            norm=norm,
        )

    def _scaler(self) -> Any:
        scalers = (getattr(leaf, "grad_scaler", None) for leaf in leaves_of(self._optimizer()))
        return next((scaler for scaler in scalers if scaler is not None), None)

    def _scale(self) -> Scalar | None:
        scaler = self._scaler()
        return None if scaler is None else snapshot_of(scaler.scale)


def _outcome(result: object) -> tuple[bool | None, Scalar | None]:
    """Return success and norm of what `step` returned; None for what is not known."""
    if isinstance(result, bool):
        return result, None
    if not isinstance(result, tuple) or len(result) < 2:
        return None, None
    success, norm = result[:2]
    return bool(success) if isinstance(success, bool | int) else None, scalar_of(norm)
