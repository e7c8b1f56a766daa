"""Measures gradients, and brings steps into the rank's ring."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch

from mp_agent.catalog.thresholds import resolve
from mp_agent.probe.delivery.base import Delivery, make_delivery
from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.run_facts import ObservedTraits, facts_of
from mp_agent.probe.optimizers.unmeasurable import Unmeasurable
from mp_agent.probe.optimizers.watched import WatchedOptimizer
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import OpenStep, observed_step
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, STEP_COLUMN_NAMES
from mp_agent.records.schema import Layer, Schema
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

_DRAIN_SECONDS = 1.0


class _Ready(NamedTuple):
    plans: Sequence[MeasurementPlan]
    writer: RingWriter
    delivery: Delivery


class _Look(NamedTuple):
    """What there is to see of one optimizer."""

    plan: MeasurementPlan
    gradients: Sequence[torch.Tensor | None]
    inverse_scale: Scalar

    @property
    def label(self) -> str:
        return self.plan.label

    @property
    def empty(self) -> bool:
        return all(gradient is None for gradient in self.gradients)


class StepRecorder:
    """Everything between an open step and the ring. Holds no plan, hence no parameters.

    trainer_lead: by how much the trainer's own step is ahead of our sequence number.
    """

    def __init__(
        self, registry: OptimizerRegistry, traits: ObservedTraits, settings: Settings
    ) -> None:
        self.trainer_lead = 0
        self._registry = registry
        self._measures = Measurement()
        self._unmeasurable = Unmeasurable(registry.note_unsupported)
        self._traits = traits
        self._schedule = LayerSchedule(settings.layer_interval, resolve(settings.thresholds))
        self._writer: RingWriter | None = None
        self._layers: tuple[tuple[Layer, ...], ...] = ()
        """Of the plans that the schema in the ring was made of."""
        self._begun: tuple[Schema, torch.device, list[int]] | None = None
        """The newest schema in the ring, the gradients' device, and the order of the layers."""
        self._order: torch.Tensor | None = None
        """Where the rows of the schema's layers stand among those of the plans, if elsewhere."""
        self._delivery: Delivery | None = None
        self._digests = True

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on; until then nothing is measured."""
        self._writer = writer

    def measure(
        self, step: OpenStep, looks: Sequence[tuple[WatchedOptimizer, Scalar]], point: str
    ) -> None:
        """Look at optimizers' gradients as they stand, and write the step as it stands, open.

        looks: the optimizers, each with 1 / the factor by which its gradients are still scaled.
        """
        if not self._layers:
            self._traits.measuring_point = point
        plans = [(watched.plan(), inverse_scale) for watched, inverse_scale in looks]
        if (ready := self._prepare()) is None:
            return
        usable = [
            (plan, scale) for plan, scale in plans if plan is not None and plan in ready.plans
        ]
        if not usable:
            return
        self._look_at_measurable(step, usable, at_all_layers=ready.delivery.wants_all_layers)
        for plan, _ in usable:
            step.note_reduction(plan.reducers.reduced())
        step.measured.update(plan.label for plan, _ in usable)
        if step.worth_telling(self._registry.labels_of_run):
            self._offer(step, ready, complete=False)

    def end(self, step: OpenStep, probe_seconds: float) -> None:
        """Note what is known of a step only at its end."""
        if (ready := self._prepare()) is None:
            return
        step.scalars["probe_seconds"] = probe_seconds
        step.scalars["step_seconds"] = perf_counter() - step.begun_seconds
        # Of several models' backwards the last one says nothing of the time before the first.
        if all(plan.of_run and plan.first_collective_in_backward for plan in ready.plans):
            step.scalars["compute_seconds"] = step.backward_seconds - step.begun_seconds
        ready.writer.count(probe_seconds=probe_seconds)

    def publish(self, step: OpenStep) -> None:
        """Write the step as complete; publish what has come from the device meanwhile."""
        if (ready := self._prepare()) is None:
            return
        if self._schedule.due(step.sequence):
            self._add_digest(step, ready.plans)
        self._offer(step, ready, complete=True)
        ready.delivery.collect()

    def lost_a_step(self) -> None:
        """Count a step whose end was not seen: something was raised in the middle of it."""
        if self._writer is not None:
            self._writer.count(records_dropped=1)

    def flush(self, step: OpenStep) -> None:
        """Publish everything, also a step that will not end; waits for a device at most 1 s."""
        telling = step.worth_telling(self._registry.labels_of_run)
        if telling and (ready := self._prepare()) is not None:
            self._offer(step, ready, complete=False)
        if self._delivery is not None:
            self._delivery.drain(_DRAIN_SECONDS)

    def _offer(self, step: OpenStep, ready: _Ready, *, complete: bool) -> None:
        seen_step = observed_step(step, self.trainer_lead, ready.plans, self._order)
        ready.delivery.offer(seen_step, complete=complete)

    def _look_at_measurable(
        self,
        step: OpenStep,
        plans: Sequence[tuple[MeasurementPlan, Scalar]],
        *,
        at_all_layers: bool,
    ) -> None:
        """Look at the gradients; once more without those that turn out not to be measurable."""
        try:
            self._look(step, plans, at_all_layers=at_all_layers)
        except Exception as error:
            pass_on(error)
            found = [
                self._unmeasurable.find(
                    plan.gradients(self._registry.note_unsupported),
                    partial(self._measures.alone, plan),
                )
                for plan, _ in plans
            ]
            if not any(found):
                raise
            self._look(step, plans, at_all_layers=at_all_layers)

    def _look(
        self,
        step: OpenStep,
        plans: Sequence[tuple[MeasurementPlan, Scalar]],
        *,
        at_all_layers: bool,
    ) -> None:
        """Fill in the totals of optimizers, and their rows per layer when they are wanted.

        One without any gradient has rows of zeros while another has some: nothing is missing.
        """
        looks: list[_Look] = []
        for plan, inverse_scale in plans:
            step.totals.pop(plan.label, None)
            step.rows.pop(plan.label, None)
            gradients = plan.gradients(self._registry.note_unsupported)
            looks.append(_Look(plan, self._unmeasurable.left_out(gradients), inverse_scale))
        if all(look.empty for look in looks):
            return
        if at_all_layers or self._schedule.due(step.sequence):
            for look in looks:
                rows_LC = step.rows[look.label] = self._layers_seen(look)
                step.totals[look.label] = look.plan.totals(rows_LC)
            return
        for look in looks:
            step.totals[look.label] = self._totals_seen(look)
        totals = [step.totals[look.label] for look in looks]
        totals_GC = totals[0] if len(totals) == 1 else torch.cat(totals)
        if self._schedule.wanted_for_trouble(totals_GC, looks[0].label):
            for look in looks:
                step.rows[look.label] = self._layers_seen(look)

    def _layers_seen(self, look: _Look) -> torch.Tensor:
        if look.empty:
            return _zeros(len(look.plan.layers), look.plan.device)
        return self._measures.layers(look.plan, look.gradients, look.inverse_scale)

    def _totals_seen(self, look: _Look) -> torch.Tensor:
        if look.empty:
            return _zeros(len(look.plan.shares), look.plan.device)
        return self._measures.totals(look.plan, look.gradients, look.inverse_scale)

    def _add_digest(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Add the digest of the weights; without it where they are no ordinary tensors."""
        if not self._digests:
            return
        try:
            if (digest := self._measures.weight_digest(plans)) is not None:
                step.scalars["weight_digest"] = digest
        except (TypeError, RuntimeError) as error:
            pass_on(error)
            self._digests = False
            self._registry.note_unsupported("digests of weights of this kind")
            log.debug("the weights have no digest", exc_info=True)

    def _prepare(self) -> _Ready | None:
        """Return what is needed to record; the ring gets a schema when there is a new plan."""
        plans = self._registry.plans()
        if not plans or self._writer is None:
            return None
        if self._delivery is None or not self._are_known(plans):
            self._delivery = self._begin(plans, self._writer)
        return _Ready(plans, self._writer, self._delivery)

    def _are_known(self, plans: Sequence[MeasurementPlan]) -> bool:
        return len(plans) == len(self._layers) and all(
            plan.layers is layers for plan, layers in zip(plans, self._layers, strict=True)
        )

    def _begin(self, plans: Sequence[MeasurementPlan], writer: RingWriter) -> Delivery:
        """Write the schema of new plans, once everything of those before is in the ring.

        Plans of which the records look the same, as those of the next optimizer of the same
        parameters or of the next model of a sweep, go on as those before.
        """
        schema = Schema(
            step_columns=STEP_COLUMN_NAMES,
            gradient_columns=GRADIENT_COLUMN_NAMES,
            shares=tuple(share for plan in plans for share in plan.shares),
            layers=_layers_of(plans),
            facts=facts_of(plans, self._traits),
        )
        device, order = plans[0].device, _module_order(plans)
        same = (schema, device, order) == self._begun
        if self._delivery is not None and same:
            self._layers = tuple(plan.layers for plan in plans)
            return self._delivery
        if self._delivery is not None:
            self._delivery.drain(_DRAIN_SECONDS)
        writer.write_schema(schema)
        self._begun = (schema, device, order)
        self._traits.reduced_by_ddp |= any("ddp" in plan.strategy for plan in plans)
        for plan in plans:
            for feature in plan.unsupported:
                self._registry.note_unsupported(feature)
        self._layers = tuple(plan.layers for plan in plans)
        in_place = order == sorted(order)
        self._order = None if in_place else torch.tensor(order, device=device)
        return make_delivery(writer, schema, self._schedule, device)


def _layers_of(plans: Sequence[MeasurementPlan]) -> tuple[Layer, ...]:
    """Return the layers of all plans, with the places that their shares have in the schema."""
    layers: list[Layer] = []
    before = 0
    for plan in plans:
        layers += [replace(layer, share=layer.share + before) for layer in plan.layers]
        before += len(plan.shares)
    return tuple(layers[index] for index in _module_order(plans))


def _module_order(plans: Sequence[MeasurementPlan]) -> list[int]:
    """Return the layers of all plans, by their numbers: those of the run's model in module order.

    Backward goes through them the other way round, whichever optimizers step them.
    """
    keys = [
        (0 if plan.of_run else number, place)
        for number, plan in enumerate(plans, 1)
        for place in plan.places
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _zeros(rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros((rows, len(GRADIENT_COLUMN_NAMES)), dtype=torch.float64, device=device)
