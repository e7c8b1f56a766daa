"""Everything between an open step and the ring: measures gradients, writes steps."""

from collections.abc import Sequence
from math import isnan
from threading import get_ident
from time import perf_counter

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery.base import Delivery
from mp_agent.probe.instruments.fp8 import fp8_library
from mp_agent.probe.instruments.instrument import Instruments, ScaledOptimizer
from mp_agent.probe.instruments.tensors import tensor_collections
from mp_agent.probe.isolation import Shield, contained
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.recording.parameter_census import CutLayers, ParameterCensus
from mp_agent.probe.recording.ring_schema import (
    DRAIN_SECONDS,
    RingSchema,
    measured_families,
    measured_step_columns,
)
from mp_agent.probe.recording.run_facts import ObservedTraits
from mp_agent.probe.recording.weight_changes import WeightChanges
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.measurement import Measurement, ScaledPlan, StepMeasurement
from mp_agent.probe.step.open_step import ObservedStep, OpenStep, observed_step
from mp_agent.records.columns import LOWEST_LEARNING_RATE
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings


def _kind_of_measuring(step: OpenStep, scaled: Sequence[ScaledOptimizer], point: str) -> str:
    labels = [watched.label for watched, _ in scaled if watched.label]
    which = f" of optimizer {labels[0]}" if len(labels) == len(scaled) > 0 else ""
    return f"measuring gradients{which}"


class StepRecorder:
    """Measures open steps, and writes them into the ring. Holds no plan, hence no parameters.

    Each thing that it does is contained: gradients that cannot be measured leave the loss, the loss
    scale, and the step's place in the count as they are.

    trainer_lead: by how much the trainer's own step is ahead of our sequence number.
    forward_is_due: what is seen only in a forward pass is measured in the step under way.
    """

    def __init__(
        self,
        shield: Shield,
        registry: OptimizerRegistry,
        traits: ObservedTraits,
        settings: Settings,
        schedule: LayerSchedule,
        measures: Measurement,
        instruments: Instruments,
    ) -> None:
        """instruments: measure what the gradients that an optimizer uses do not show."""
        self.trainer_lead = 0
        self.forward_is_due = True
        self._shield = shield
        self._registry = registry
        self._traits = traits
        self._schedule = schedule
        self._step_measurement = StepMeasurement(
            measures,
            schedule,
            registry.note_unsupported,
            distribution=settings.measure_distribution,
        )
        self._schema = RingSchema(
            schedule,
            traits,
            measured_families(settings),
            measured_step_columns(settings),
            registry.note_unsupported,
        )
        self._instruments = instruments
        self._census = ParameterCensus(registry, traits)
        self._cut_layers = CutLayers(shield.run, registry, traits)
        self._changes = WeightChanges(registry, traits)
        self._host_is_ahead = False
        self._writer: RingWriter | None = None

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on; until then nothing is measured."""
        self._writer = writer

    @contained(_kind_of_measuring)
    def measure(self, step: OpenStep, scaled: Sequence[ScaledOptimizer], point: str) -> None:
        """Measure optimizers' gradients as they are, and write the step as it is, open.

        scaled: the optimizers, each with 1 / the factor by which its gradients are still
        multiplied. point: where in the step this is, for the run's facts.
        """
        if not self._schema.written:
            self._traits.measuring_point = point
            self._traits.fp8_library = fp8_library(self._registry.root)
        if not step.totals:  # no record of the step is written yet: the schema may have new names
            self._traits.collections = tensor_collections.fact
            if self._cut_layers.looking and scaled[0][0].of_run:
                self._look_at_order(step)
            if step.sequence >= self._census.looks.due and scaled[0][0].of_run:
                if self._registry.ranks_in_run() > 1:
                    self._instruments.have_ranks()
                self._take_census(step)
            if step.sequence >= self._changes.looks.due and scaled[0][0].of_run:
                self._compare_weights(step)
        self._instruments.measuring_begins(step, scaled)
        plans = self._registry.plans()
        by_label = {plan.label: plan for plan in plans}
        found: list[ScaledPlan] = []
        for watched, inverse_scale in scaled:
            watched.thread = get_ident()
            if (plan := by_label.get(watched.label)) is not None:
                self._traits.gradient_formats.note(plan)
                found.append((plan, inverse_scale))
        if (delivery := self._prepare(plans)) is None:
            return
        usable = [each for each in found if accelerator.is_supported(each[0].device)]
        if not usable:
            for plan, _ in found:
                kind = plan.device.type
                self._registry.note_unsupported(f"gradients on devices of type {kind}")
            return
        of_run = any(plan.of_run for plan, _ in usable)
        if not self._schedule.measures(step.sequence):
            if of_run:
                step.scalars["gradients_measured"] = 0.0
            step.measured.update(plan.label for plan, _ in usable)
            self._instruments.gradients_left_out(step, [plan for plan, _ in usable])
            return
        if of_run:
            # Of an engine whose gradients are not known to be right, there are no layers.
            known = any(plan.layers or not plan.unsupported for plan, _ in usable if plan.of_run)
            step.scalars["gradients_measured"] = float(known)
        timer = accelerator.start_timer(usable[0][0].device)
        self._step_measurement.fill_in(step, usable, at_all_layers=delivery.wants_all_layers)
        measured = [plan for plan, _ in usable]
        for reducers in (plan.reducers for plan in measured if plan.reducers.any):
            reduced = reducers.reduced_present()
            if reduced or not isnan(step.backward_seconds):
                step.note_reduction(reduced)  # what CUDA graphs reduce says nothing of it
        self._instruments.gradients_measured(step, measured)
        if of_run and step.sequence >= self._changes.looks.due:
            self._sample_weights(step, usable)
        if timer is not None:
            timer.stop()
            step.timers.append(timer)
        step.measured.update(plan.label for plan, _ in usable)
        if step.worth_reporting(self._registry.roles.labels_of_run):
            delivery.offer(self._observed(step), complete=False)

    @contained("comparing parameters with optimizers")
    def _take_census(self, step: OpenStep) -> None:
        soon = self._cut_layers.look(step.scalars)
        self._census.look(step.sequence, step.scalars, soon=soon)

    @contained("finding layers that are cut off")
    def _look_at_order(self, step: OpenStep) -> None:
        self._cut_layers.forward_ended(step.scalars)

    @contained("comparing weights with earlier ones")
    def _compare_weights(self, step: OpenStep) -> None:
        self._changes.compare(step)

    @contained("keeping weights to compare later ones with")
    def _sample_weights(self, step: OpenStep, plans: Sequence[ScaledPlan]) -> None:
        with torch.no_grad():
            self._changes.sample(step, plans)

    @contained("timing a step")
    def end(self, step: OpenStep, probe_seconds: float) -> None:
        """Record what is known of a step only at its end.

        probe_seconds: host time that the probe has spent since the end of the step before.
        """
        plans = self._registry.plans()
        if not plans or self._writer is None:
            return
        self._instruments.finish(step)
        if (rate := step.scalars.get("learning_rate")) is not None:
            step.scalars[LOWEST_LEARNING_RATE] = rate
        step.scalars["probe_seconds"] = probe_seconds
        step_seconds = perf_counter() - step.begun_seconds
        step.scalars["step_seconds"] = step_seconds
        self._instruments.step_timed(step, step_seconds)
        self._add_overhead(step, step_seconds, probe_seconds)
        # Of several models' backwards the last one says nothing of the time before the first.
        if all(plan.of_run and plan.first_collective_in_backward for plan in plans):
            step.scalars["compute_seconds"] = step.backward_seconds - step.begun_seconds
        self._writer.spend(probe_seconds)

    def begin_forward(self, after: OpenStep) -> None:
        """Prepare for what is measured in the forward pass of the step that follows, if due."""
        model = self._registry.root
        self._instruments.step_begins(model)
        if self._cut_layers.due:
            self._cut_layers.forward_begins(model)
        self.forward_is_due = self._schedule.due_after(after.sequence)
        if self.forward_is_due:
            self._instruments.begin(model)

    def _add_overhead(self, step: OpenStep, step_seconds: float, probe_seconds: float) -> None:
        """Record what measuring costs, and by which intervals it is kept within the budget.

        Host time costs nothing while the device has not come to what was measured: the host then
        waits for room in the device's queue, in the probe's launches as in any others.
        """
        budget = self._schedule.budget
        if step.timers:
            self._host_is_ahead = not step.timers[0].has_begun()
        host_seconds = 0.0 if self._host_is_ahead else probe_seconds
        budget.note_step(step_seconds, host_seconds, with_layers=bool(step.rows))
        step.scalars["measuring_interval_steps"] = float(budget.stride)
        step.scalars["layer_interval_steps"] = float(self._schedule.interval_steps)
        if budget.host_ratio is not None:
            step.scalars["host_overhead_ratio"] = budget.host_ratio
        if budget.device_ratio is not None:
            step.scalars["device_overhead_ratio"] = budget.device_ratio

    @contained("writing a step")
    def publish(self, step: OpenStep, *, relabelled: bool = False) -> None:
        """Write the step as complete; publish what has come from the device meanwhile.

        relabelled: the optimizers have other labels than when it was measured, in the step as well.
        """
        plans = self._registry.plans()
        delivery = self._prepare(plans) if relabelled else self._prepare_to_write(plans)
        if delivery is None:
            if self._writer is not None and plans:
                self._writer.drop_step(step.sequence)
            return
        delivery.offer(self._observed(step), complete=True)
        delivery.collect()

    def close(self) -> None:
        """Leave modules and functions as they were."""
        self._instruments.close()
        self._cut_layers.close()

    def lost_a_step(self) -> None:
        """Count a step whose end was not seen: something was raised in the middle of it."""
        if self._writer is not None:
            self._writer.count(records_dropped=1)

    @contained("publishing what has arrived")
    def collect(self) -> None:
        """Publish what has come from the device meanwhile."""
        if (delivery := self._schema.delivery) is not None and delivery.pending:
            delivery.collect()

    @contained("writing the last step")
    def flush(self, step: OpenStep) -> None:
        """Publish everything, also a step that will not end; waits for a device at most 1 s.

        Where only the loss may be a reason, the delivery decides when it has arrived.
        """
        worthwhile = step.worth_reporting(self._registry.roles.labels_of_run)
        try:
            if (worthwhile or step.loss_is_unread) and (
                delivery := self._prepare_to_write(self._registry.plans())
            ) is not None:
                observed = self._observed(step, only_if_nonfinite=not worthwhile)
                delivery.offer(observed, complete=False)
        finally:
            if self._schema.delivery is not None:
                self._schema.delivery.drain(DRAIN_SECONDS)

    def _observed(self, step: OpenStep, *, only_if_nonfinite: bool = False) -> ObservedStep:
        return observed_step(
            step, self.trainer_lead, self._schema.optimizers, only_if_nonfinite=only_if_nonfinite
        )

    def _prepare(self, plans: Sequence[MeasurementPlan]) -> Delivery | None:
        """Return what takes records; the ring gets a schema when there is a new plan."""
        if not plans or self._writer is None:
            return None
        self._schema.own_families = self._instruments.layers()
        self._schema.leaves_out = bool(self._registry.left_out)
        return self._schema.delivery_for(plans, self._writer)

    def _prepare_to_write(self, plans: Sequence[MeasurementPlan]) -> Delivery | None:
        """Return what takes a step that was measured before.

        Where the optimizers are gone since, or have other parameters, it keeps the schema that it
        was measured by: the last step of a loop may have waited for another optimizer, and the
        function that held both has returned.
        """
        delivery = self._schema.delivery
        if self._writer is None or delivery is None or not self._schema.outlives(plans):
            return self._prepare(plans)
        return delivery
