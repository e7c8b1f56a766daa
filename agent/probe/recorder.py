"""Measures gradients, and brings steps into the rank's ring."""

from time import perf_counter
from typing import NamedTuple

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


class _Ready(NamedTuple):
    plan: Plan
    writer: RingWriter
    delivery: Delivery


class Recorder:
    """Everything between an open step and the ring. Holds no plan, hence no parameters.

    trainer_lead: by how much the trainer's own step is ahead of our sequence number.
    """

    def __init__(self, subject: Subject, traits: Traits, settings: Settings) -> None:
        self.trainer_lead = 0
        self._subject = subject
        self._traits = traits
        self._schedule = LayerSchedule(settings.layer_interval, resolve(settings.thresholds))
        self._writer: RingWriter | None = None
        self._schema: Schema | None = None
        self._delivery: Delivery | None = None

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on; until then nothing is measured."""
        self._writer = writer

    def measure(self, step: OpenStep, point: str, inverse_scale: Scalar) -> None:
        """Look at the gradients as they stand, and write the step as it stands, open.

        `inverse_scale` is 1 / the factor by which the gradients are still scaled.
        """
        if self._schema is None:
            self._traits.measuring_point = point
        if (ready := self._prepare()) is None:
            return
        delivery = ready.delivery
        self._look(step, ready.plan, inverse_scale, at_all_layers=delivery.wants_all_layers)
        step.measured = True
        delivery.offer(seen(step, self.trainer_lead, len(ready.plan.shares)), complete=False)

    def finish(self, step: OpenStep, probe_seconds: float) -> None:
        """Write the step as complete; publish what has come from the device meanwhile."""
        if (ready := self._prepare()) is None:
            return
        step.scalars["probe_seconds"] = probe_seconds
        step.scalars["step_seconds"] = perf_counter() - step.begun_seconds
        if ready.plan.first_collective_in_backward:
            step.scalars["compute_seconds"] = step.backward_seconds - step.begun_seconds
        delivery = ready.delivery
        delivery.offer(seen(step, self.trainer_lead, len(ready.plan.shares)), complete=True)
        delivery.collect()
        ready.writer.count(probe_seconds=probe_seconds)

    def flush(self, step: OpenStep) -> None:
        """Publish everything, also a step that will not end; waits for a device at most 1 s."""
        if step.worth_telling and (ready := self._prepare()) is not None:
            shares = len(ready.plan.shares)
            ready.delivery.offer(seen(step, self.trainer_lead, shares), complete=False)
        if self._delivery is not None:
            self._delivery.drain(_DRAIN_SECONDS)

    def _look(
        self, step: OpenStep, plan: Plan, inverse_scale: Scalar, *, at_all_layers: bool
    ) -> None:
        """Fill in the step's totals, and its rows per layer when they are wanted."""
        gradients = plan.gradients()
        if all(gradient is None for gradient in gradients):
            step.totals_GC = step.rows_LC = None
        elif at_all_layers or self._schedule.due(step.sequence):
            step.rows_LC = self._subject.layers(plan, gradients, inverse_scale)
            step.totals_GC = plan.totals(step.rows_LC)
        else:
            step.totals_GC = self._subject.totals(plan, gradients, inverse_scale)
            in_trouble = self._schedule.wanted_for_trouble(step.totals_GC)
            step.rows_LC = (
                self._subject.layers(plan, gradients, inverse_scale) if in_trouble else None
            )

    def _prepare(self) -> _Ready | None:
        """Return what is needed to record; the ring gets a schema when there is a new plan."""
        plan = self._subject.plan()
        if plan is None or self._writer is None:
            return None
        if self._delivery is None or self._schema is None or plan.layers is not self._schema.layers:
            self._delivery = self._begin(plan, self._writer)
        return _Ready(plan, self._writer, self._delivery)

    def _begin(self, plan: Plan, writer: RingWriter) -> Delivery:
        """Write the schema of a new plan, once everything of the plan before is in the ring."""
        if self._delivery is not None:
            self._delivery.drain(_DRAIN_SECONDS)
        schema = Schema(
            step_columns=STEP_COLUMN_NAMES,
            gradient_columns=GRADIENT_COLUMN_NAMES,
            shares=plan.shares,
            layers=plan.layers,
            facts=facts_of(plan, self._traits),
        )
        writer.write_schema(schema)
        for feature in plan.unsupported:
            writer.note_unsupported(feature)
        self._schema = schema
        return make_delivery(writer, schema, self._schedule, plan.device)
