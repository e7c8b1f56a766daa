"""The rank's own gradients of the step under way, before they are reduced over the ranks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import nan
from sys import float_info

import torch
from torch.distributed.tensor import DTensor

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceTimer
from mp_agent.probe.local_gradients.gradient_hooks import LocalGradientHooks, Run
from mp_agent.probe.optimizers.layer_slots import PARTIAL_GRADIENT, lies_like
from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.placement import world_size
from mp_agent.probe.scalars import Scalar, add, reciprocal, scalar_of
from mp_agent.probe.statistics.table import folded_rows
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import (
    GRADIENT_POSITIONS,
    GRADIENTS,
    LOCAL_GRAD_NONFINITE_BACKWARD,
    LOCAL_GRAD_NONFINITE_ELEMENTS,
    LOCAL_GRAD_NORM,
)
from mp_agent.records.schema import Layer

_SUM_SQUARES = GRADIENT_POSITIONS["sum_squares"]
_NONFINITE = tuple(GRADIENT_POSITIONS[name] for name in GRADIENTS.nonfinite)

_SUPPORTED = frozenset({"none", "mixed", "ddp", "tp", "declared"})
"""Ways of splitting and copying a model with which autograd adds to the parameters' gradients."""

UNSEEN = "local gradients that backward does not add to the optimizer's parameters"


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Parameters that were measured together, by their places, and their statistics [C]."""

    places: frozenset[int]
    row_C: torch.Tensor


class LocalGradients:
    """Measures what this rank alone has added up, by hooks on the parameters of the run's model.

    Of a step with several backwards, gradients are as they stood in the last one that reached them:
    without reductions in between (`no_sync`) the sum over all micro-batches.
    """

    def __init__(self, run: Run, registry: OptimizerRegistry, *, fused_kernels: bool) -> None:
        self._registry = registry
        self._hooks = LocalGradientHooks(run, self._measure)
        self._measures = Measurement(registry.note_unsupported, fused_kernels=fused_kernels)
        self._layers: tuple[tuple[Layer, ...], ...] = ()
        """Of the plans whose parameters have hooks."""
        self._sequence = 0
        self._parts: dict[int, _Part] = {}
        """Of the step under way, by the place of each parameter."""
        self._nonfinite: list[Scalar] = []
        """NaN and Inf elements after each of its backwards."""
        self._timers: list[DeviceTimer] = []

    def backward_begins(self, step: OpenStep, *, wanted: bool) -> None:
        """Prepare for a backward of the run. wanted: whether the step's gradients are measured."""
        if step.sequence != self._sequence:
            self._sequence = step.sequence
            self.forget()
        self._nonfinite.append(0.0)
        plans = self._plans()
        layers = tuple(plan.layers for plan in plans)
        new = len(layers) != len(self._layers) or any(
            now is not before for now, before in zip(layers, self._layers, strict=True)
        )
        self._hooks.watch(_parameters(plans), new=new)
        self._layers = layers
        self._hooks.backward_begins(
            wanted=wanted and bool(plans), together=all(map(_stay_local, plans))
        )

    def forget(self) -> None:
        """Forget what was measured: the gradients were cleared, or a step has ended."""
        self._parts.clear()
        self._nonfinite.clear()
        self._timers.clear()

    def add_to(self, step: OpenStep) -> None:
        """Set the columns of a step; the loss scale in force is known by then.

        Of gradients taken at weights between two steps nothing is added (SAM).
        """
        if step.sequence != self._sequence or not self._nonfinite:
            return
        if step.settled and LOCAL_GRAD_NORM in step.scalars:
            return
        if not self._parts:
            if self._layers and step.totals:
                self._registry.note_unsupported(UNSEEN)
            return
        parts = {id(part): part.row_C for part in self._parts.values()}
        total_C = folded_rows(torch.stack(list(parts.values())))
        norm = scalar_of(total_C[_SUM_SQUARES].clamp(max=float_info.max).sqrt())
        elements = scalar_of(_nonfinite_elements(total_C))
        if norm is None or elements is None:
            return
        scale = step.scalars.get("loss_scale")
        step.scalars[LOCAL_GRAD_NORM] = norm if scale is None else norm * reciprocal(scale)
        step.scalars[LOCAL_GRAD_NONFINITE_ELEMENTS] = elements
        step.scalars[LOCAL_GRAD_NONFINITE_BACKWARD] = _first_above_zero(self._nonfinite)
        if not accelerator.is_on_host(total_C.device):
            step.streams.add(accelerator.current_stream(total_C.device))
        step.timers += self._timers
        self._timers.clear()

    def close(self) -> None:
        """Remove the hooks, until the next backward."""
        self._layers = ()
        self._hooks.close()

    def _measure(self, places: Collection[int]) -> None:
        """Measure gradients as they stand, again with those that were measured together before."""
        overlapping = {self._parts[place].places for place in places if place in self._parts}
        whole = frozenset(places).union(*overlapping)
        plans = self._plans()
        parameters = _parameters(plans)
        found = [self._gradient(parameters[place]) for place in sorted(whole)]
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients:
            return
        device = plans[0].device
        timer = accelerator.start_timer(device)
        row_C = self._measures.together(device, gradients)
        if timer is not None:
            timer.stop()
            self._timers.append(timer)
        self._parts.update(dict.fromkeys(whole, _Part(whole, row_C)))
        elements = scalar_of(_nonfinite_elements(row_C))
        if elements is not None and self._nonfinite:
            self._nonfinite[-1] = add(self._nonfinite[-1], elements)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            return gradient
        if lies_like(gradient, parameter):
            return gradient.to_local()
        self._registry.note_unsupported(PARTIAL_GRADIENT)
        return None

    def _plans(self) -> Sequence[MeasurementPlan]:
        """Return the plans of the run into whose parameters autograd itself adds gradients."""
        found: list[MeasurementPlan] = []
        for watched in self._registry.roles.of_run:
            plan = watched.plan()
            if plan is None:
                continue
            if watched.managed or plan.reducers.shard or not _SUPPORTED.issuperset(_ways(plan)):
                self._registry.note_unsupported(f"local gradients under {plan.strategy}")
            elif not found or plan.device == found[0].device:
                found.append(plan)
        return found


def _parameters(plans: Sequence[MeasurementPlan]) -> list[torch.Tensor]:
    return [slot.parameter for plan in plans for slot in plan.slots]


def _ways(plan: MeasurementPlan) -> Sequence[str]:
    return plan.strategy.split("+")


def _stay_local(plan: MeasurementPlan) -> bool:
    """Return whether gradients are surely the rank's own until backward ends."""
    late = plan.reducers.replace_late
    return world_size() == 1 if late is None else late


def _nonfinite_elements(row_C: torch.Tensor) -> torch.Tensor:
    return row_C[_NONFINITE[0]] + row_C[_NONFINITE[1]]


def _first_above_zero(counts: Sequence[Scalar]) -> Scalar:
    """Return the number, from 1, of the first count above zero; NaN where there is none."""
    device = next((each.device for each in counts if isinstance(each, torch.Tensor)), None)
    if device is None:
        return next((float(place) for place, each in enumerate(counts, 1) if each > 0.0), nan)
    above = torch.stack(
        [
            each if isinstance(each, torch.Tensor) else torch.full((), each, device=device).double()
            for each in counts
        ]
    ).gt(0.0)
    first = above.double().argmax().double() + 1.0
    return first.masked_fill(~above.any(), nan)
