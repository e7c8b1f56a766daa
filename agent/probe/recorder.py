"""Measures gradients, and brings steps into the rank's ring."""

from time import perf_counter

from mp_agent.catalog.thresholds import resolve
from mp_agent.probe.delivery import Delivery, make_delivery
from mp_agent.probe.facts import Traits, facts_of
from mp_agent.probe.plan import Plan
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.schedule import LayerSchedule
from mp_agent.probe.step import OpenStep, seen
from mp_agent.probe.subject import Subject
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, STEP_COLUMN_NAMES
from mp_agent.records.schema import Schema
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

_DRAIN_SECONDS = 1.0


class Recorder:
    """Everything between an open step and the ring.

    trainer_lead: by how much the trainer's own step is ahead of our sequence number.
    """

    def __init__(self, subject: Subject, traits: Traits, settings: Settings) -> None:
        self.trainer_lead = 0
        self._subject = subject
        self._traits = traits
        self._schedule = LayerSchedule(settings.layer_interval, resolve(settings.thresholds))
        self._writer: RingWriter | None = None
        self._plan: Plan | None = None
        self._delivery: Delivery | None = None

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on; until then nothing is measured."""
        self._writer = writer

    def measure(self, step: OpenStep, point: str, inverse_scale: Scalar) -> None:
        """Look at the gradients as they stand, and write the step as it stands, open.

        `inverse_scale` is 1 / the factor by which the gradients are still scaled.
        """
        if self._plan is None:
            self._traits.measuring_point = point
        delivery = self._prepare()
        if delivery is None or self._plan is None:
            return
        self._look(step, self._plan, inverse_scale)
        step.measured = True
        delivery.offer(seen(step, self.trainer_lead, len(self._plan.shares)), complete=False)

    def finish(self, step: OpenStep, probe_seconds: float) -> None:
        """Write the step as complete; publish what has come from the device meanwhile."""
        delivery = self._prepare()
        if delivery is None or self._plan is None or self._writer is None:
            return
        step.scalars["probe_seconds"] = probe_seconds
        step.scalars["step_seconds"] = perf_counter() - step.begun_seconds
        if self._plan.first_collective_in_backward:
            step.scalars["compute_seconds"] = step.backward_seconds - step.begun_seconds
        delivery.offer(seen(step, self.trainer_lead, len(self._plan.shares)), complete=True)
        delivery.collect()
        self._writer.count(probe_seconds=probe_seconds)

    def flush(self, step: OpenStep) -> None:
        """Publish everything, also a step that will not end; waits for a device at most 1 s."""
        if self._delivery is None or self._plan is None:
            return
        if step.attempted:
            self._delivery.offer(
                seen(step, self.trainer_lead, len(self._plan.shares)), complete=False
            )
        self._delivery.drain(_DRAIN_SECONDS)

    def _look(self, step: OpenStep, plan: Plan, inverse_scale: Scalar) -> None:
        """Fill in the step's totals, and its rows per layer when they are wanted.

        Off the CPU rows are always computed, since trouble shows only when it is too late to look.
        """
        gradients = plan.gradients()
        if all(gradient is None for gradient in gradients):
            step.totals_GC = step.rows_LC = None
            return
        on_host = plan.device.type == "cpu"
        if not on_host or self._schedule.due(step.sequence):
            step.rows_LC = self._subject.layers(plan, gradients, inverse_scale)
            step.totals_GC = plan.totals(step.rows_LC)
            return
        step.totals_GC = self._subject.totals(plan, gradients, inverse_scale)
        step.rows_LC = None
        if self._schedule.wanted_for_trouble(step.totals_GC):
            step.rows_LC = self._subject.layers(plan, gradients, inverse_scale)

    def _prepare(self) -> Delivery | None:
        """Return the way to the ring, made anew when there is something else to measure."""
        plan = self._subject.plan()
        if plan is None or self._writer is None:
            return None
        if self._delivery is None or plan is not self._plan:
            if self._delivery is not None:
                self._delivery.drain(_DRAIN_SECONDS)
            schema = Schema(
                step_columns=STEP_COLUMN_NAMES,
                gradient_columns=GRADIENT_COLUMN_NAMES,
                shares=plan.shares,
                layers=plan.layers,
                facts=facts_of(plan, self._traits),
            )
            self._writer.write_schema(schema)
            for feature in plan.unsupported:
                self._writer.note_unsupported(feature)
            self._delivery = make_delivery(self._writer, schema, self._schedule, plan.device)
            self._plan = plan
        return self._delivery
