"""Reads one DeepSpeed engine: its optimizer, scale and clipping, and what became of a step."""

import weakref
from math import isfinite
from typing import Any

import torch
from torch.optim import Optimizer

from mp_agent.probe.deepspeed.plan import make_plan
from mp_agent.probe.optimizers.engine import EngineResult, EngineStep
from mp_agent.probe.optimizers.engine_plan import EnginePlan
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of


class EngineReader:
    """Implements `optimizers.engine.OwningEngine` for a `DeepSpeedEngine`, held weakly."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._scale_before: Scalar | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that steps the master weights."""
        basic = getattr(self._engine(), "basic_optimizer", None)
        return basic if isinstance(basic, Optimizer) else None

    @property
    def scaler_name(self) -> str:
        """DeepSpeed's own loss scaler, or torch's under its autocast; empty without FP16."""
        if (scaler := autocast_scaler(self._engine())) is not None:
            return type(scaler).__name__
        optimizer = _optimizer(self._engine())
        if _own_scale(optimizer) is None:
            return ""
        scaler = getattr(optimizer, "loss_scaler", None)
        if scaler is not None:
            return type(scaler).__name__
        dynamic = getattr(optimizer.loss_scale_config, "dynamic_loss_scale", False)
        return "DynamicLossScaler" if dynamic else "LossScaler"

    def make_plan(self, label: str) -> EnginePlan:
        """Return what to measure of the engine's model."""
        return make_plan(self._engine(), label)

    def begin(self) -> EngineStep:
        """Return the loss scale in force, and the engine's count of steps."""
        engine = self._engine()
        scaler = autocast_scaler(engine)
        if scaler is not None:
            self._scale_before = snapshot_of(scaler._get_scale_async())
        else:
            self._scale_before = _own_scale(_optimizer(engine))
        completed = getattr(engine, "global_steps", None)
        return EngineStep(
            loss_scale=self._scale_before,
            gradient_scale=self._scale_before if _scales_loss(engine) else None,
            completed=completed if isinstance(completed, int) else None,
        )

    def end(self) -> EngineResult:
        """Return whether the step was skipped, and the clipping that it did."""
        engine: Any = self._engine()
        optimizer = _optimizer(engine)
        overflow = getattr(optimizer, "overflow", False)
        by_scaler = autocast_scaler(engine) is not None
        limit = engine.gradient_clipping()
        return EngineResult(
            skipped=None if by_scaler and not overflow else bool(overflow),
            clip_max_norm=float(limit) if limit and limit > 0 else None,
            norm=self._norm(optimizer),
        )

    def _norm(self, optimizer: Any) -> Scalar | None:
        """Return the norm that a ZeRO optimizer has gathered from all ranks."""
        if not hasattr(optimizer, "backward_prologue"):
            return None
        norm = scalar_of(getattr(optimizer, "_global_grad_norm", None))
        if norm is None:
            return None
        if isinstance(norm, torch.Tensor):
            return norm.masked_fill(norm < 0, torch.nan)  # -1 stands for a norm that is no number
        scale, before = _own_scale(optimizer), self._scale_before
        if hasattr(optimizer, "fp16_partitioned_groups_flat") and scale and before:
            norm *= float(scale) / float(before)  # stage 3 divides by the scale of the next step
        return norm if isfinite(norm) and norm >= 0 else torch.nan


def autocast_scaler(engine: Any) -> Any:
    """Return torch's GradScaler where DeepSpeed scales losses by it."""
    return getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(
        _optimizer(engine), "torch_autocast_gradscaler", None
    )


def _scales_loss(engine: Any) -> bool:
    """Return whether the loss is scaled before backward.

    DeepSpeed 0.19 does so for ZeRO's optimizers alone; its others divide gradients by a scale that
    nothing has multiplied them with.
    """
    by_optimizer = not hasattr(type(engine), "scale")  # before 0.18, by a method of any optimizer
    scales = by_optimizer or hasattr(_optimizer(engine), "scale_if_loss")
    return scales or autocast_scaler(engine) is not None


def _optimizer(engine: Any) -> Any:
    return getattr(engine, "optimizer", None)


def _own_scale(optimizer: Any) -> Scalar | None:
    """Return the scale of an optimizer of FP16 weights; None for other types."""
    config = getattr(optimizer, "loss_scale_config", None)
    if config is not None:
        if not getattr(config, "use_grad_scaling", True):
            return None
    elif getattr(optimizer, "dtype", None) is not torch.float16:
        return None
    return scalar_of(getattr(optimizer, "loss_scale", None))
