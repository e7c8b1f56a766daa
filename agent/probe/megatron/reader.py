"""Reads one of Megatron's optimizers: its loss scale and clipping, and what became of a step."""

import weakref
from typing import Any

from torch.optim import Optimizer

from mp_agent.probe.megatron.gradients import leaves_of, torch_optimizers
from mp_agent.probe.megatron.plan import make_plan
from mp_agent.probe.optimizers.engine import EngineResult, EngineStep
from mp_agent.probe.optimizers.engine_plan import EnginePlan
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of


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
