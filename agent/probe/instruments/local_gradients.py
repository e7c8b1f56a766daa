"""Measures a rank's own gradients, and their part of a step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import nan
from operator import is_
from sys import float_info
from typing import NamedTuple

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceTimer
from mp_agent.probe.instruments.instrument import Instrument, ScaledOptimizer
from mp_agent.probe.instruments.local_gradient_sources import (
    GradientSource,
    LocalGradientHooks,
    Run,
    sources_of,
)
from mp_agent.probe.optimizers.engine import EnginePlan
from mp_agent.probe.optimizers.plan import PARTIAL_GRADIENT, MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.placement import world_size
from mp_agent.probe.scalars import Scalar, add, reciprocal, scalar_of
from mp_agent.probe.statistics.pieces import folded_rows
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.measurement import Measurement
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


class OwnGradients(NamedTuple):
    """The gradients of a step: norm and NaN and Inf elements, and where these began."""

    norm: Scalar
    nonfinite_elements: Scalar
    nonfinite_backward: Scalar
    """Number, from 1, of the first backward after which there were some; NaN without any."""
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Parameters that were measured together, by their places, and their statistics [C]."""

    places: frozenset[int]
    row_C: torch.Tensor


class LocalTotals:
    """The newest statistics of each parameter's gradient in the step under way.

    NaN and Inf of gradients that a wrapper has taken away, to reduce them, count besides.
    """

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        """Parts by the place of each parameter."""
        self._taken: set[_Part] = set()
        self._elements_taken: Scalar = 0.0
        self._rows: list[torch.Tensor] = []
        """All statistics [C] of the backward under way, also those that others have replaced."""
        self._nonfinite: list[Scalar] = []
        """NaN and Inf elements after each backward, without those of `_rows`."""
        self._begins_unknown = False
        """Whether it is not known after which backward there were some first."""

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def begun(self) -> bool:
        """Whether a backward of the step has begun."""
        return bool(self._nonfinite)

    def backward_begins(self, was_taken: Callable[[int], bool]) -> None:
        """Begin a backward. was_taken: whether the gradient of a place is no longer there."""
        self._count_rows()
        self._nonfinite.append(0.0)
        present = [part for part in self._different_parts() if part not in self._taken]
        gone = [part for part in present if all(map(was_taken, part.places))]
        self._elements_taken = _more(self._elements_taken, [part.row_C for part in gone])
        self._taken.update(gone)

    def forget(self) -> None:
        """Forget the step."""
        self._parts.clear()
        self._taken.clear()
        self._elements_taken = 0.0
        self._rows.clear()
        self._nonfinite.clear()
        self._begins_unknown = False

    def measured_with(self, places: Collection[int]) -> frozenset[int]:
        """Return places, and those that were measured together with any of them before."""
        overlapping = {self._parts[place].places for place in places if place in self._parts}
        return frozenset(places).union(*overlapping)

    def note(self, places: frozenset[int], row_C: torch.Tensor, *, is_sum: bool = False) -> None:
        """Take the statistics [C] of gradients, in place of those that they had before.

        is_sum: of all backwards of the step, so that it is not known where NaN and Inf began.
        """
        self._begins_unknown = is_sum and len(self._nonfinite) > 1
        self._parts.update(dict.fromkeys(places, _Part(places, row_C)))
        self._rows.append(row_C)

    def found(self) -> OwnGradients | None:
        """Return what the parts come to; None where there is no number."""
        parts = self._different_parts()
        if not parts:
            return None
        self._count_rows()
        total_C = folded_rows(torch.stack([part.row_C for part in parts]))
        norm = scalar_of(total_C[_SUM_SQUARES].clamp(max=float_info.max).sqrt())
        if norm is None:
            return None
        present = [part.row_C for part in parts if part not in self._taken]
        return OwnGradients(
            norm,
            _more(self._elements_taken, present),
            nan if self._begins_unknown else _first_above_zero(self._nonfinite),
            total_C.device,
        )

    def _different_parts(self) -> list[_Part]:
        """Return each part once, in the order in which their parameters were first measured."""
        return list(dict.fromkeys(self._parts.values()))

    def _count_rows(self) -> None:
        if self._nonfinite:
            self._nonfinite[-1] = _more(self._nonfinite[-1], self._rows)
        self._rows.clear()


def _more(elements: Scalar, rows: Sequence[torch.Tensor]) -> Scalar:
    """Return a number of NaN and Inf elements, and those of statistics [C] besides."""
    if not rows:
        return elements
    total_C = folded_rows(torch.stack(list(rows)))
    further = scalar_of(total_C[_NONFINITE[0]] + total_C[_NONFINITE[1]])
    return elements if further is None else add(elements, further)


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


_SUPPORTED = frozenset({"none", "mixed", "ddp", "fsdp2", "hsdp", "tp", "declared"})
"""Ways of splitting and copying a model of which it is known where autograd adds gradients."""

UNSEEN = "local gradients that backward does not add to the optimizer's parameters"


class LocalGradients(Instrument):
    """Measures what this rank alone has added up, by hooks on what backward adds gradients to.

    Of a step with several backwards, gradients are as they stood in the last one that reached them:
    without reductions in between (`no_sync`) the sum over all micro-batches.
    """

    subject = "local gradients"

    def __init__(
        self,
        run: Run,
        registry: OptimizerRegistry,
        schedule: LayerSchedule,
        *,
        only_after_trouble: bool,
        fused_kernels: bool,
    ) -> None:
        """only_after_trouble: without hooks but in stretches of denser samples."""
        self._schedule = schedule
        self._only_after_trouble = only_after_trouble
        self._registry = registry
        self._hooks = LocalGradientHooks(run, self._measure)
        self._measures = Measurement(registry.note_unsupported, fused_kernels=fused_kernels)
        self._layers: tuple[tuple[Layer, ...], ...] = ()
        """Layers of the plans whose parameters have hooks."""
        self._sources: list[GradientSource] = []
        """Sources of the gradients of these parameters."""
        self._device = torch.device("cpu")
        self._sequence = 0
        self._wanted = False
        """Whether gradients of the step under way are to be measured."""
        self._totals = LocalTotals()
        self._timers: list[DeviceTimer] = []

    def backward_begins(self, step: OpenStep) -> None:
        """Prepare for a backward of the run, if the step is one of which gradients are measured."""
        if self._only_after_trouble and not self._schedule.follows_trouble(step.sequence):
            self.close()
            return
        wanted = self._schedule.measures(step.sequence)
        if step.sequence != self._sequence:
            self._sequence = step.sequence
            self.gradients_cleared()
        plans = self._plans()
        self._watch(plans)
        self._wanted = wanted
        self._totals.backward_begins(self._was_taken)
        self._hooks.backward_begins(
            wanted=wanted and bool(self._sources), together=all(map(_stay_local, plans))
        )

    def reduction_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        """Measure the sums over all backwards of the step, in the buffers of an engine."""
        if not self._wanted or not gradients:
            return
        timer = accelerator.start_timer(gradients[0].device)
        row_C = self._measures.together(gradients[0].device, gradients)
        if timer is not None:
            timer.stop()
            self._timers.append(timer)
        self._totals.note(frozenset(each.data_ptr() for each in gradients), row_C, is_sum=True)

    def gradients_cleared(self) -> None:
        """Forget what was measured: the gradients were cleared, or a step has ended."""
        self._totals.forget()
        self._timers.clear()

    def measuring_begins(self, step: OpenStep, scaled: Sequence[ScaledOptimizer]) -> None:
        """Set the columns of a step whose gradients are about to be used."""
        if any(watched.of_run for watched, _ in scaled):
            self.finish(step)

    def finish(self, step: OpenStep) -> None:
        """Set the columns of a step; the loss scale in force is known by then.

        Of gradients taken at weights between two steps nothing is added (SAM).
        """
        if step.sequence != self._sequence or not self._totals.begun:
            return
        if step.settled and LOCAL_GRAD_NORM in step.scalars:
            return
        if not self._totals:
            if self._sources and step.totals:
                self._registry.note_unsupported(UNSEEN)
            return
        found = self._totals.found()
        if found is None:
            return
        scale = step.scalars.get("loss_scale")
        unscaled = found.norm if scale is None else found.norm * reciprocal(scale)
        unscaled = unscaled * step.factor
        step.scalars[LOCAL_GRAD_NORM] = unscaled
        step.scalars[LOCAL_GRAD_NONFINITE_ELEMENTS] = found.nonfinite_elements
        step.scalars[LOCAL_GRAD_NONFINITE_BACKWARD] = found.nonfinite_backward
        if not accelerator.is_on_host(found.device):
            step.streams.add(accelerator.current_stream(found.device))
        step.timers += self._timers
        self._timers.clear()

    def close(self) -> None:
        """Remove the hooks, until the next backward that is prepared for."""
        if self._layers:
            self._layers, self._sources = (), []
            self._hooks.close()
            self.gradients_cleared()

    def _watch(self, plans: Sequence[MeasurementPlan]) -> None:
        """Have hooks on what backward adds the gradients of these plans to."""
        layers = tuple(plan.layers for plan in plans)
        same = len(layers) == len(self._layers) and all(map(is_, layers, self._layers))
        new = not same or not all(source.is_current for source in self._sources)
        if new:
            sources = self._sources_of(plans)
            if not same or len(sources) != len(self._sources):
                self.gradients_cleared()  # places are those of other parameters from now on
            self._layers, self._sources = layers, sources
            self._device = plans[0].device if plans else self._device
        self._hooks.watch(self._sources, new=new)

    def _sources_of(self, plans: Sequence[MeasurementPlan]) -> list[GradientSource]:
        found: list[GradientSource] = []
        for plan in plans:
            sources = sources_of(plan)
            if sources is None:
                self._note_unsupported(plan)
            found += sources or []
        return found

    def _measure(self, places: Collection[int]) -> None:
        """Measure gradients as they are, again with those that were measured together before."""
        whole = self._totals.measured_with(places)
        found = [self._gradient(self._sources[place]) for place in sorted(whole)]
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients:
            return
        timer = accelerator.start_timer(self._device)
        row_C = self._measures.together(self._device, gradients)
        if timer is not None:
            timer.stop()
            self._timers.append(timer)
        self._totals.note(whole, row_C)

    def _was_taken(self, place: int) -> bool:
        return place < len(self._sources) and self._sources[place].was_taken

    def _gradient(self, source: GradientSource) -> torch.Tensor | None:
        try:
            return source.gradient()
        except ValueError:
            self._registry.note_unsupported(PARTIAL_GRADIENT)
            return None

    def _plans(self) -> Sequence[MeasurementPlan]:
        """Return the plans of the run of which it is known where gradients are added."""
        found: list[MeasurementPlan] = []
        for watched in self._registry.roles.of_run:
            plan = watched.plan()
            if plan is None or (isinstance(plan, EnginePlan) and plan.announces_reduction):
                continue
            if watched.managed or not _SUPPORTED.issuperset(plan.strategy.split("+")):
                self._note_unsupported(plan)
            elif not found or plan.device == found[0].device:
                found.append(plan)
        return found

    def _note_unsupported(self, plan: MeasurementPlan) -> None:
        self._registry.note_unsupported(f"local gradients under {plan.strategy}")


def _stay_local(plan: MeasurementPlan) -> bool:
    """Return whether gradients are surely the rank's own until backward ends."""
    late = plan.reducers.replace_late
    return world_size() == 1 if late is None else late
