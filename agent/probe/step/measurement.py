"""Measures the gradients and weights of plans, by the means of the device that they lie on.

Of a step all gradients, or those that turn out to be measurable.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.probe.statistics.pieces import folded_rows
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import OpenStep, SampledRows
from mp_agent.records.columns import DISTRIBUTION, GRADIENT_COLUMN_NAMES, GRADIENTS, ColumnFamily
from mp_agent.records.schema import Layer
from mp_agent.ring.interruptions import pass_on

UNFUSED = "measuring gradients by fused kernels, which cannot be compiled"


class Measurement:
    """Keeps the working memory of each device's statistics, of each stream its own.

    Streams need not wait for each other, so what one of them works on no other may touch.
    note_unsupported: called with what a GPU's gradients have to be measured without.
    distribution: whether kernels for `distribution` are compiled as well.
    """

    def __init__(
        self,
        note_unsupported: Callable[[str], None],
        *,
        fused_kernels: bool = True,
        distribution: bool = False,
    ) -> None:
        self._note_unsupported = note_unsupported
        self._fused_kernels = fused_kernels
        self._of_distribution = distribution
        self._statistics: dict[Hashable, GradientStatistics] = {}
        self._constants = DeviceConstants()

    def layers(
        self, plan: MeasurementPlan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [L, C] of each layer, on the gradients' device."""
        return self._statistics_on(plan.device).layers(gradients, inverse_scale)

    def totals(
        self, plan: MeasurementPlan, gradients: Sequence[torch.Tensor | None], inverse_scale: Scalar
    ) -> torch.Tensor:
        """Return the statistics [G, C] of each share, on the gradients' device."""
        return self._statistics_on(plan.device).totals(plan.by_share(gradients), inverse_scale)

    def distribution(
        self,
        plan: MeasurementPlan,
        gradients: Sequence[torch.Tensor | None],
        inverse_scale: Scalar,
        loss_scale: Scalar | None,
    ) -> torch.Tensor:
        """Return how each layer's gradient is distributed [L, C], on the gradients' device."""
        statistics = self._statistics_on(plan.device)
        return statistics.distribution(gradients, inverse_scale, loss_scale)

    def totals_of_layers(
        self, plan: MeasurementPlan, rows_LC: torch.Tensor, family: ColumnFamily = GRADIENTS
    ) -> torch.Tensor:
        """Return [G, C]: the columns' algebra applied to the layers of each share, on device."""
        if len(plan.shares) == 1:
            return folded_rows(rows_LC, family)[None]
        places = (self._constants.on(plan.device, rows) for rows in plan.rows_of_share)
        return torch.stack(
            [folded_rows(rows_LC.index_select(0, place), family) for place in places]
        )

    def together(self, device: torch.device, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the statistics [C] of some gradients on a device, as they are."""
        return self._statistics_on(device).totals([gradients], 1.0)[0]

    def alone(self, plan: MeasurementPlan, gradient: torch.Tensor) -> None:
        """Measure one gradient in both ways, for what that raises."""
        statistics = self._statistics_on(plan.device)
        statistics.layers([gradient], 1.0)
        statistics.totals([[gradient]], 1.0)

    def digests(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the bits of each tensor [N], left on their device."""
        return self._statistics_on(device).digests(tensors)

    def _statistics_on(self, device: torch.device) -> GradientStatistics:
        stream = (device, accelerator.current_stream(device))
        found = self._statistics.get(stream)
        if found is None:
            found = accelerator.kept_per_stream(
                self._statistics, stream, lambda: self._made(device)
            )
        return found

    def _made(self, device: torch.device) -> GradientStatistics:
        statistics = for_device(
            device, fused_kernels=self._fused_kernels, distribution=self._of_distribution
        )
        stock = isinstance(statistics, PackedStatistics)
        if device.type == "cuda" and stock and self._fused_kernels:
            self._note_unsupported(UNFUSED)
        return statistics


Gradients = Sequence[torch.Tensor | None]
Kind = tuple[type, torch.layout, torch.dtype, bool]


class Unmeasurable:
    """Kinds of gradients that failed when measured alone; they are left out from then on.

    Only what is no plain tensor counts as a kind: a plain one fails for another reason, such as a
    device without memory, and may be measured at the next step.
    """

    def __init__(self, note_unsupported: Callable[[str], None]) -> None:
        self._note_unsupported = note_unsupported
        self.kinds: set[Kind] = set()

    def left_out(self, gradients: Gradients) -> Gradients:
        """Return `gradients` with None in place of those that cannot be measured."""
        return [
            None if gradient is None or _kind(gradient) in self.kinds else gradient
            for gradient in gradients
        ]

    def find(self, gradients: Gradients, measure: Callable[[torch.Tensor], object]) -> bool:
        """Try each kind of odd gradients alone; return whether any failed that had not before."""
        known = len(self.kinds)
        tried: set[Kind] = set(self.kinds)
        for gradient in gradients:
            if gradient is None or (kind := _kind(gradient)) in tried or not _is_odd(kind):
                continue
            tried.add(kind)
            try:
                measure(gradient)
            except Exception as error:
                pass_on(error)
                if accelerator.is_sticky_error(error) or isinstance(error, torch.OutOfMemoryError):
                    return False  # no fault of the gradient
                self.kinds.add(kind)
                self._note_unsupported(f"gradients of type {_name(kind)}")
        return len(self.kinds) > known


def _kind(gradient: torch.Tensor) -> Kind:
    """Return what decides whether a gradient can be measured; asks no subclass."""
    layout: torch.layout = torch.Tensor.layout.__get__(gradient)  # type: ignore[attr-defined]
    dtype: torch.dtype = torch.Tensor.dtype.__get__(gradient)  # type: ignore[attr-defined]
    return type(gradient), layout, dtype, gradient.is_nested


def _is_odd(kind: Kind) -> bool:
    cls, layout, dtype, nested = kind
    plain = cls in (torch.Tensor, torch.nn.Parameter) and layout is torch.strided and not nested
    return not (plain and dtype.is_floating_point)


def _name(kind: Kind) -> str:
    cls, layout, dtype, nested = kind
    words = [cls.__name__, str(dtype).removeprefix("torch.")]
    if layout is not torch.strided:
        words.append(str(layout).removeprefix("torch."))
    return " ".join([*words, *(["nested"] if nested else [])])


ScaledPlan = tuple[MeasurementPlan, Scalar]
"""A plan, and 1 / the factor by which its gradients are still multiplied."""


class _Gradients(NamedTuple):
    """What there is to measure of one optimizer now."""

    plan: MeasurementPlan
    label: str
    gradients: Gradients
    inverse_scale: Scalar
    empty: bool
    """Whether there is no gradient."""


class StepMeasurement:
    """Measures the present gradients of optimizers."""

    def __init__(
        self,
        measures: Measurement,
        schedule: LayerSchedule,
        note_unsupported: Callable[[str], None],
        *,
        distribution: bool = True,
    ) -> None:
        """distribution: whether the family `DISTRIBUTION` is measured on sampled steps."""
        self._measures = measures
        self._schedule = schedule
        self._note_unsupported = note_unsupported
        self._distribution = distribution
        self._unmeasurable = Unmeasurable(note_unsupported)

    def fill_in(self, step: OpenStep, plans: Sequence[ScaledPlan], *, at_all_layers: bool) -> None:
        """Measure all gradients; once more without those that turn out not to be measurable.

        at_all_layers: measure the layers of every step, because the host cannot know which.
        """
        try:
            self._measure(step, plans, at_all_layers=at_all_layers)
        except Exception as error:
            pass_on(error)
            found = [
                self._unmeasurable.find(
                    plan.gradients(self._note_unsupported), partial(self._measures.alone, plan)
                )
                for plan, _ in plans
            ]
            if not any(found):
                raise
            self._measure(step, plans, at_all_layers=at_all_layers)

    def _measure(self, step: OpenStep, plans: Sequence[ScaledPlan], *, at_all_layers: bool) -> None:
        """Fill in the totals of optimizers, and their rows per layer when they are wanted.

        One without any gradient has rows of zeros while another has some: nothing is missing.
        """
        measured: list[_Gradients] = []
        for plan, inverse_scale in plans:
            sampled = step.sampled.get(DISTRIBUTION.name, SampledRows())
            of_step = (step.totals, step.rows, step.unread_scales, sampled.totals, sampled.rows)
            for known in of_step:
                known.pop(plan.label, None)
            gradients: Gradients = plan.gradients(self._note_unsupported)
            if self._unmeasurable.kinds:
                gradients = self._unmeasurable.left_out(gradients)
            empty = all(gradient is None for gradient in gradients)
            measured.append(_Gradients(plan, plan.label, gradients, inverse_scale, empty))
        if all(each.empty for each in measured):
            return
        measured = [self._readable(step, each) for each in measured]
        due = self._schedule.due(step.sequence)
        if at_all_layers or due:
            for each in measured:
                rows_LC = step.rows[each.label] = self._layers(each)
                # Copies are compared bit by bit, and ranks may have other steps with layers.
                step.totals[each.label] = (
                    self._measures.totals_of_layers(each.plan, rows_LC)
                    if at_all_layers
                    else self._totals(each)
                )
                if self._distribution and due:
                    self._add_distribution(step, each)
            return
        for each in measured:
            step.totals[each.label] = self._totals(each)
        totals = [step.totals[each.label] for each in measured]
        totals_GC = totals[0] if len(totals) == 1 else torch.cat(totals)
        unscaled = not any(each.label in step.unread_scales for each in measured)
        label = measured[0].label
        if self._schedule.wanted_for_trouble(totals_GC, label, norm_is_known=unscaled):
            for each in measured:
                step.rows[each.label] = self._layers(each)

    def _add_distribution(self, step: OpenStep, measured: _Gradients) -> None:
        """Add how gradients are distributed, unless their scale cannot be read where they are."""
        if measured.label in step.unread_scales:
            return
        plan, scale = measured.plan, step.scalars.get("loss_scale")
        if isinstance(scale, torch.Tensor) and accelerator.is_on_host(plan.device):
            scale = None  # reading it would wait for its device
        rows_LC = self._measures.distribution(
            plan, measured.gradients, measured.inverse_scale, scale
        )
        sampled = step.sampled.setdefault(DISTRIBUTION.name, SampledRows())
        sampled.rows[plan.label] = rows_LC
        sampled.totals[plan.label] = self._measures.totals_of_layers(plan, rows_LC, DISTRIBUTION)

    def _readable(self, step: OpenStep, measured: _Gradients) -> _Gradients:
        """Return it with a scale that is on the gradients' device, or a number on the host.

        The scale of gradients that were offloaded to the host is on a device, where reading it
        would wait: their statistics stay multiplied by it until it arrives.
        """
        scale, device = measured.inverse_scale, measured.plan.device
        on_host = accelerator.is_on_host(device)
        if not on_host:
            step.streams.add(accelerator.current_stream(device))
        if not isinstance(scale, torch.Tensor):
            return measured
        if on_host:
            step.unread_scales[measured.label] = scale
            return measured._replace(inverse_scale=1.0)
        return measured._replace(inverse_scale=scale.to(device, non_blocking=True))

    def _layers(self, measured: _Gradients) -> torch.Tensor:
        if measured.empty:
            return _zeros(len(measured.plan.layers), measured.plan.device)
        return self._measures.layers(measured.plan, measured.gradients, measured.inverse_scale)

    def _totals(self, measured: _Gradients) -> torch.Tensor:
        if measured.empty:
            return _zeros(len(measured.plan.shares), measured.plan.device)
        return self._measures.totals(measured.plan, measured.gradients, measured.inverse_scale)


def _zeros(rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros((rows, len(GRADIENT_COLUMN_NAMES)), dtype=torch.float64, device=device)


class GradientFormats:
    """How many elements of each format the gradients of each plan have.

    They are counted as a plan is measured, by the thread that makes its gradients: to read `grad`
    while the backward of another thread writes it would end the process.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[Sequence[Layer], Counter[torch.dtype]]] = {}
        """Dtypes by label, with the layers of the plan that they were found for."""

    def note(self, plan: MeasurementPlan) -> None:
        """Count the gradients of a plan, unless that is done."""
        layers, elements = self._found.get(plan.label, ((), Counter()))
        if layers is not plan.layers or not elements:
            self._found[plan.label] = plan.layers, plan.gradient_formats()

    def of(self, plans: Sequence[MeasurementPlan]) -> Counter[torch.dtype]:
        """Return how many elements of each format the gradients of several plans have."""
        found = (self._found[plan.label][1] for plan in plans if plan.label in self._found)
        return sum(found, start=Counter[torch.dtype]())
