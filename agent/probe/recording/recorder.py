"""Everything between an open step and the ring: measures gradients, writes steps."""

from collections.abc import Sequence
from threading import get_ident
from time import perf_counter
from typing import NamedTuple

import torch

from mp_agent.catalog.thresholds import resolve
from mp_agent.probe import accelerator
from mp_agent.probe.delivery.base import Delivery
from mp_agent.probe.instruments.forward_pass import ForwardStart, Instruments, overriding
from mp_agent.probe.instruments.fp8 import fp8_library
from mp_agent.probe.instruments.local_gradients import LocalGradients
from mp_agent.probe.instruments.logprobs import StepLogprobs
from mp_agent.probe.instruments.tensors import WatchedTensors, tensor_collections
from mp_agent.probe.isolation import Shield, contained
from mp_agent.probe.optimizers.measurement import Measurement
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.optimizers.run_facts import ObservedTraits
from mp_agent.probe.recording.replica_evidence import HeldState, WeightBits
from mp_agent.probe.recording.ring_schema import (
    DRAIN_SECONDS,
    RingSchema,
    measured_families,
    measured_step_columns,
)
from mp_agent.probe.recording.step_measurement import StepMeasurement
from mp_agent.probe.recording.weight_updates import WeightUpdates
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.layer_schedule import LayerSchedule, OverheadBudget
from mp_agent.probe.step.open_step import ObservedStep, OpenStep, observed_step
from mp_agent.probe.step.phases import StepParts
from mp_agent.records.columns import LOGPROBS, STATE, TENSORS
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings


class _Ready(NamedTuple):
    plans: Sequence[MeasurementPlan]
    writer: RingWriter
    delivery: Delivery
    ranks: int
    """That train together, where gradients are measured."""


def _kind_of_measuring(
    step: OpenStep, scaled: Sequence[tuple[WatchedOptimizer, Scalar]], point: str
) -> str:
    labels = [watched.label for watched, _ in scaled if watched.label]
    which = f" of optimizer {labels[0]}" if len(labels) == len(scaled) > 0 else ""
    return f"measuring gradients{which}"


class StepRecorder:
    """Measures open steps, and writes them into the ring. Holds no plan, hence no parameters.

    Each thing that it does is contained: gradients that cannot be measured leave the loss, the loss
    scale, and the step's place in the count as they are.

    trainer_lead: by how much the trainer's own step is ahead of our sequence number.
    """

    def __init__(
        self,
        shield: Shield,
        registry: OptimizerRegistry,
        traits: ObservedTraits,
        settings: Settings,
        instruments: Instruments,
        tensors: WatchedTensors | None = None,
        forward_start: ForwardStart | None = None,
        local_gradients: LocalGradients | None = None,
    ) -> None:
        """None leaves out what an argument is for.

        instruments: measure what is seen only in the passes. tensors: what the script watches.
        forward_start: sees when the forward pass begins. local_gradients: measures them before
        they are reduced.
        """
        self.trainer_lead = 0
        self._shield = shield
        self._registry = registry
        self._traits = traits
        self._schedule = LayerSchedule(
            settings.layer_interval,
            resolve(settings.thresholds),
            OverheadBudget(settings.overhead_budget, settings.layer_interval),
        )
        self._measures = Measurement(
            registry.note_unsupported,
            fused_kernels=settings.fused_kernels,
            distribution=settings.measure_distribution,
        )
        self._step_measurement = StepMeasurement(
            self._measures,
            self._schedule,
            registry.note_unsupported,
            distribution=settings.measure_distribution,
        )
        self.updates = WeightUpdates(self._measures, settings, registry.note_unsupported)
        self._schema = RingSchema(
            self._schedule,
            traits,
            measured_families(settings),
            measured_step_columns(settings),
            registry.note_unsupported,
        )
        self._instruments = instruments
        self._measuring_backward = overriding(instruments, "backward_ended")
        self._finishing = overriding(instruments, "finish")
        self._tensors = tensors
        self._forward_start = forward_start
        self._local_gradients = local_gradients
        self._local_only_after_trouble = settings.measure_local_gradients == "after_trouble"
        self._logprobs = StepLogprobs(registry.note_unsupported)
        self._host_is_ahead = False
        self._writer: RingWriter | None = None
        self._weights = WeightBits(self._measures, registry.note_unsupported)
        self._state = HeldState(self._measures, registry.note_unsupported)

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on; until then nothing is measured."""
        self._writer = writer

    @contained(_kind_of_measuring)
    def measure(
        self, step: OpenStep, scaled: Sequence[tuple[WatchedOptimizer, Scalar]], point: str
    ) -> None:
        """Measure optimizers' gradients as they stand, and write the step as it stands, open.

        scaled: the optimizers, each with 1 / the factor by which its gradients are still
        multiplied. point: where in the step this is, for the run's facts.
        """
        if not self._schema.written:
            self._traits.measuring_point = point
            self._traits.fp8_library = fp8_library(self._registry.root)
        if not step.totals:  # no record of the step is written yet: the schema may have new names
            self._traits.collections = tensor_collections.fact
            if self._tensors is not None and self._tensors.used:
                self._tensors.admit()
        if self._local_gradients is not None and any(watched.of_run for watched, _ in scaled):
            self.add_local_gradients(step)
        plans = self._registry.plans()
        by_label = {plan.label: plan for plan in plans}
        found: list[tuple[MeasurementPlan, Scalar]] = []
        for watched, inverse_scale in scaled:
            watched.thread = get_ident()
            if (plan := by_label.get(watched.label)) is not None:
                self._traits.gradient_formats.note(plan)
                found.append((plan, inverse_scale))
        if (ready := self._prepare(plans)) is None:
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
            return
        if of_run:
            step.scalars["gradients_measured"] = 1.0
        timer = accelerator.start_timer(usable[0][0].device)
        self._step_measurement.fill_in(step, usable, at_all_layers=ready.delivery.wants_all_layers)
        measured = [plan for plan, _ in usable]
        if self.updates.enabled and self._schedule.due(step.sequence):
            self.keep_weights(step, measured)
        for plan in measured:
            if (reduced := plan.reducers.reduced()) is not None:
                step.note_reduction(reduced)
        if ready.ranks > 1:
            self._add_bits(step, measured)
        if timer is not None:
            timer.stop()
            step.timers.append(timer)
        step.measured.update(plan.label for plan, _ in usable)
        if step.worth_telling(self._registry.roles.labels_of_run):
            ready.delivery.offer(self._observed(step), complete=False)

    @contained("copying weights")
    def keep_weights(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Copy the weights that the updates of a sampled step will be compared with."""
        self.updates.keep(step, plans)

    @contained("measuring updates of weights")
    def measure_updates(self, step: OpenStep, watched: WatchedOptimizer) -> None:
        """Measure what an optimizer has done, if this is a sampled step that it did not skip."""
        if not self._schedule.due(step.sequence):
            return
        optimizer, plan = watched.optimizer, watched.plan()
        if optimizer is None or plan is None:
            return
        if watched.managed:
            self._registry.note_unsupported("updates of weights that an engine steps")
            return
        skipped = watched.scalars.get("skipped", 0.0)
        if not isinstance(skipped, torch.Tensor) and skipped:
            self.updates.forget(plan.label)
            return
        timer = accelerator.start_timer(plan.device)
        self.updates.measure(step, plan, optimizer)
        if not plan.of_run:
            step.forget_if(skipped, plan.label)
        if timer is not None:
            timer.stop()
            step.timers.append(timer)

    @contained("timing a step")
    def end(self, step: OpenStep, parts: StepParts, probe_seconds: float) -> None:
        """Record what is known of a step only at its end.

        parts: how long they took. probe_seconds: host time that the probe has spent since the
        end of the step before.
        """
        if (ready := self._prepare(self._registry.plans())) is None:
            return
        if self._tensors is not None and self._tensors.used:
            self.add_tensors(step)
        for what, instrument in self._finishing.items():
            self._shield.contain(f"measuring {what}", instrument.finish, step)
        if self._local_gradients is not None:
            self.add_local_gradients(step)
        step.scalars["probe_seconds"] = probe_seconds
        step_seconds = perf_counter() - step.begun_seconds
        step.scalars["step_seconds"] = step_seconds
        if self._forward_start is not None:
            step.scalars.update(parts.known(step_seconds))
        self._add_overhead(step, step_seconds, probe_seconds)
        # Of several models' backwards the last one says nothing of the time before the first.
        if all(plan.of_run and plan.first_collective_in_backward for plan in ready.plans):
            step.scalars["compute_seconds"] = step.backward_seconds - step.begun_seconds
        ready.writer.count(probe_seconds=probe_seconds)

    @contained("preparing a forward pass")
    def begin_forward(self, after: OpenStep) -> None:
        """Prepare for what is measured in the forward pass of the step that follows, if due."""
        due = self._schedule.due_after(after.sequence)
        if self._tensors is not None:
            self._tensors.begin(due=due)
        for what, instrument in self._instruments.items() if due else ():
            kind = f"preparing to measure {what}"
            self._shield.contain(kind, instrument.begin, self._registry.root)
        if self._forward_start is not None:
            self._forward_start.watch(self._registry.root)

    @contained("measuring a forward pass")
    def forward_ended(self, step: OpenStep) -> None:
        """Add to the step what was measured in its first forward pass."""
        for what, instrument in self._instruments.items():
            self._shield.contain(f"measuring {what}", instrument.end, step)

    @contained("preparing for local gradients")
    def backward_begins(self, step: OpenStep) -> None:
        """Prepare for what is measured while a backward of the run makes gradients."""
        if self._local_gradients is None:
            return
        if self._local_only_after_trouble and not self._schedule.follows_trouble(step.sequence):
            self._local_gradients.close()
            return
        wanted = self._schedule.measures(step.sequence)
        self._local_gradients.backward_begins(step, wanted=wanted)

    def reduction_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        """Measure the rank's own gradients, which are about to be reduced."""
        if self._local_gradients is not None:
            self._local_gradients.reduction_begins(gradients)

    def gradients_cleared(self) -> None:
        """Forget what was measured of gradients of the run that no step will use."""
        if self._local_gradients is not None:
            self._local_gradients.forget()

    @contained("adding local gradients")
    def add_local_gradients(self, step: OpenStep) -> None:
        """Add to the step what was measured of the gradients before they were reduced."""
        if self._local_gradients is not None:
            self._local_gradients.add_to(step)

    @contained("measuring a backward pass")
    def backward_ended(self, step: OpenStep) -> None:
        """Add to the step what was measured in its first backward pass."""
        for what, instrument in self._measuring_backward.items():
            kind = f"measuring {what} in backward"
            self._shield.contain(kind, instrument.backward_ended, step)

    @contained("comparing log-probabilities")
    def compare_logprobs(
        self, step: OpenStep, trainer: object, sampler: object, mask: object
    ) -> None:
        """Add to the step how the log-probabilities of two engines differ."""
        self._logprobs.add(step, trainer, sampler, mask)

    @contained("adding watched tensors")
    def add_tensors(self, step: OpenStep) -> None:
        """Add to the step what was measured of the tensors that the script watches."""
        if self._tensors is not None:
            self._tensors.take(step)

    def close(self) -> None:
        """Leave modules and functions as they were, until the next forward pass that is due."""
        if self._local_gradients is not None:
            self._local_gradients.close()
        if self._forward_start is not None:
            self._forward_start.close()
        for what, instrument in self._instruments.items():
            self._shield.contain(f"measuring {what}", instrument.close)

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
        ready = self._prepare(plans) if relabelled else self._prepare_to_write(plans)
        if ready is None:
            if self._writer is not None and plans:
                self._writer.drop_step(step.sequence)
            return
        ready.delivery.offer(self._observed(step), complete=True)
        ready.delivery.collect()

    def _add_bits(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Add what replicas are compared by, unless another thread may be changing it meanwhile."""
        if self._registry.trains_in_several_threads():
            self._registry.note_unsupported("digests of weights that several threads train")
            return
        reduced = step.scalars.get("gradients_reduced") == 1.0
        if step.weights_moved and not reduced:
            return  # by gradients of this rank's own
        if not reduced:
            self._weights.add_sample(step, plans)
        if self._schedule.compares(step.sequence):
            self._weights.add(step, plans)
            self._state.add(step)

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
        worthwhile = step.worth_telling(self._registry.roles.labels_of_run)
        try:
            if (worthwhile or step.loss_is_unread) and (
                ready := self._prepare_to_write(self._registry.plans())
            ) is not None:
                observed = self._observed(step, only_if_nonfinite=not worthwhile)
                ready.delivery.offer(observed, complete=False)
        finally:
            if self._schema.delivery is not None:
                self._schema.delivery.drain(DRAIN_SECONDS)

    def _observed(self, step: OpenStep, *, only_if_nonfinite: bool = False) -> ObservedStep:
        return observed_step(
            step, self.trainer_lead, self._schema.optimizers, only_if_nonfinite=only_if_nonfinite
        )

    def _prepare(self, plans: Sequence[MeasurementPlan]) -> _Ready | None:
        """Return what is needed to record; the ring gets a schema when there is a new plan."""
        if not plans or self._writer is None:
            return None
        families: dict[str, tuple[str, ...]] = {}
        for instrument in self._instruments.values():
            families.update(instrument.layers(self._registry.root))
        if self._tensors is not None and self._tensors.names:
            families[TENSORS.name] = self._tensors.names
        if self._logprobs.used:
            families[LOGPROBS.name] = ()
        ranks = self._registry.ranks_in_run()
        if ranks > 1 and (names := self._state.names(self._registry.root, plans)):
            families[STATE.name] = names
        self._schema.own_families = families
        delivery = self._schema.delivery_for(plans, self._writer)
        return None if delivery is None else _Ready(plans, self._writer, delivery, ranks)

    def _prepare_to_write(self, plans: Sequence[MeasurementPlan]) -> _Ready | None:
        """Return what is needed to write a step that was measured before.

        Where the optimizers are gone since, or have other parameters, it keeps the schema that it
        was measured by: the last step of a loop may have waited for another optimizer, and the
        function that held both has returned.
        """
        delivery = self._schema.delivery
        if self._writer is None or delivery is None or not self._schema.outlives(plans):
            return self._prepare(plans)
        return _Ready([], self._writer, delivery, 1)
