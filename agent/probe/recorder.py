"""Measures gradients, and brings steps into the rank's ring."""

import logging
from collections.abc import Sequence
from dataclasses import replace
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
from mp_agent.probe.subjects import Subjects
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, STEP_COLUMN_NAMES
from mp_agent.records.schema import Layer, Schema
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

_DRAIN_SECONDS = 1.0


class _Ready(NamedTuple):
    plans: Sequence[Plan]
    writer: RingWriter
    delivery: Delivery


class Recorder:
    """Everything between an open step and the ring. Holds no plan, hence no parameters.

    trainer_lead: by how much the trainer's own step is ahead of our sequence number.
    """

    def __init__(self, subjects: Subjects, traits: Traits, settings: Settings) -> None:
        self.trainer_lead = 0
        self._subjects = subjects
        self._traits = traits
        self._schedule = LayerSchedule(settings.layer_interval, resolve(settings.thresholds))
        self._writer: RingWriter | None = None
        self._layers: tuple[tuple[Layer, ...], ...] = ()
        """Of the plans that the schema in the ring was made of."""
        self._delivery: Delivery | None = None
        self._digests = True

    def write_to(self, writer: RingWriter) -> None:
        """Write to this ring from now on; until then nothing is measured."""
        self._writer = writer

    def measure(self, step: OpenStep, subject: Subject, point: str, inverse_scale: Scalar) -> None:
        """Look at an optimizer's gradients as they stand, and write the step as it stands, open.

        `inverse_scale` is 1 / the factor by which the gradients are still scaled.
        """
        if not self._layers:
            self._traits.measuring_point = point
        plan = subject.plan()
        if (ready := self._prepare()) is None or plan is None or plan not in ready.plans:
            return
        self._look(step, plan, inverse_scale, at_all_layers=ready.delivery.wants_all_layers)
        step.measured.add(plan.label)
        ready.delivery.offer(seen(step, self.trainer_lead, ready.plans), complete=False)

    def end(self, step: OpenStep, probe_seconds: float) -> None:
        """Note what is known of a step only at its end."""
        if (ready := self._prepare()) is None:
            return
        step.scalars["probe_seconds"] = probe_seconds
        step.scalars["step_seconds"] = perf_counter() - step.begun_seconds
        # Of several optimizers' backwards the last one says nothing of the time before the first.
        if len(ready.plans) == 1 and ready.plans[0].first_collective_in_backward:
            step.scalars["compute_seconds"] = step.backward_seconds - step.begun_seconds
        ready.writer.count(probe_seconds=probe_seconds)

    def publish(self, step: OpenStep) -> None:
        """Write the step as complete; publish what has come from the device meanwhile."""
        if (ready := self._prepare()) is None:
            return
        if self._schedule.due(step.sequence):
            self._add_digest(step, ready.plans)
        ready.delivery.offer(seen(step, self.trainer_lead, ready.plans), complete=True)
        ready.delivery.collect()

    def flush(self, step: OpenStep) -> None:
        """Publish everything, also a step that will not end; waits for a device at most 1 s."""
        if step.worth_telling and (ready := self._prepare()) is not None:
            ready.delivery.offer(seen(step, self.trainer_lead, ready.plans), complete=False)
        if self._delivery is not None:
            self._delivery.drain(_DRAIN_SECONDS)

    def _look(
        self, step: OpenStep, plan: Plan, inverse_scale: Scalar, *, at_all_layers: bool
    ) -> None:
        """Fill in an optimizer's totals, and its rows per layer when they are wanted."""
        label = plan.label
        step.totals.pop(label, None)
        step.rows.pop(label, None)
        gradients = plan.gradients(self._subjects.note_unsupported)
        if all(gradient is None for gradient in gradients):
            return
        if at_all_layers or self._schedule.due(step.sequence):
            rows_LC = step.rows[label] = self._subjects.layers(plan, gradients, inverse_scale)
            step.totals[label] = plan.totals(rows_LC)
            return
        totals_GC = step.totals[label] = self._subjects.totals(plan, gradients, inverse_scale)
        if self._schedule.wanted_for_trouble(totals_GC, label):
            step.rows[label] = self._subjects.layers(plan, gradients, inverse_scale)

    def _add_digest(self, step: OpenStep, plans: Sequence[Plan]) -> None:
        """Add the digest of the weights; without it where they are no ordinary tensors."""
        if not self._digests:
            return
        try:
            if (digest := self._subjects.weight_digest(plans)) is not None:
                step.scalars["weight_digest"] = digest
        except (TypeError, RuntimeError):
            self._digests = False
            self._subjects.note_unsupported("digests of weights of this kind")
            log.debug("the weights have no digest", exc_info=True)

    def _prepare(self) -> _Ready | None:
        """Return what is needed to record; the ring gets a schema when there is a new plan."""
        plans = self._subjects.plans()
        if not plans or self._writer is None:
            return None
        if self._delivery is None or not self._are_known(plans):
            self._delivery = self._begin(plans, self._writer)
        return _Ready(plans, self._writer, self._delivery)

    def _are_known(self, plans: Sequence[Plan]) -> bool:
        return len(plans) == len(self._layers) and all(
            plan.layers is layers for plan, layers in zip(plans, self._layers, strict=True)
        )

    def _begin(self, plans: Sequence[Plan], writer: RingWriter) -> Delivery:
        """Write the schema of new plans, once everything of those before is in the ring."""
        if self._delivery is not None:
            self._delivery.drain(_DRAIN_SECONDS)
        schema = Schema(
            step_columns=STEP_COLUMN_NAMES,
            gradient_columns=GRADIENT_COLUMN_NAMES,
            shares=tuple(share for plan in plans for share in plan.shares),
            layers=_layers_of(plans),
            facts=facts_of(plans, self._traits),
        )
        writer.write_schema(schema)
        self._traits.reduced_by_ddp |= any("ddp" in plan.strategy for plan in plans)
        for plan in plans:
            for feature in plan.unsupported:
                self._subjects.note_unsupported(feature)
        self._layers = tuple(plan.layers for plan in plans)
        return make_delivery(writer, schema, self._schedule, plans[0].device)


def _layers_of(plans: Sequence[Plan]) -> tuple[Layer, ...]:
    """Return the layers of all plans, with the places that their shares have in the schema."""
    layers: list[Layer] = []
    before = 0
    for plan in plans:
        layers += [replace(layer, share=layer.share + before) for layer in plan.layers]
        before += len(plan.shares)
    return tuple(layers)
