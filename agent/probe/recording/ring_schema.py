"""Keeps the schema in the ring in agreement with the plans of the watched optimizers."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from mp_agent.probe import accelerator
from mp_agent.probe.delivery.base import Delivery, SucceedingDelivery, make_delivery, source_of
from mp_agent.probe.delivery.transfers import device_slots
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.recording.run_facts import ObservedTraits, facts_of
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import OptimizerRows
from mp_agent.records.columns import (
    DISTRIBUTION,
    FAMILIES,
    OPTIMIZER,
    ColumnFamily,
    step_columns,
)
from mp_agent.records.reduction import REDUCED_COLUMNS
from mp_agent.records.schema import Layer, RankIdentity, Schema, Share, family_columns
from mp_agent.ring.files import SHORTAGES
from mp_agent.ring.interruptions import pass_on
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

log = logging.getLogger("mp_agent")

RETRY_SECONDS = 10.0
DRAIN_SECONDS = 1.0
"""How long everything before is waited for, at most, when it must be in the ring."""

_Begun = tuple[Schema, torch.device, list[int]]


class RingSchema:
    """The newest schema in the ring. Holds no plan, hence no parameters.

    delivery: brings records of this schema into the ring; None before the first.
    """

    def __init__(
        self,
        schedule: LayerSchedule,
        traits: ObservedTraits,
        families: Sequence[ColumnFamily],
        step_columns: tuple[str, ...],
        note_unsupported: Callable[[str], None],
    ) -> None:
        """families: those to measure; one that is not of parameters only where it has layers."""
        self.delivery: Delivery | None = None
        self._schedule = schedule
        self._traits = traits
        self._families = families
        self._step_columns = step_columns
        self._note_unsupported = note_unsupported
        self.own_families: Mapping[str, tuple[str, ...]] = {}
        """The layers, or none, of each family that is not of parameters, for the next schema."""
        self.leaves_out = False
        """Whether optimizers of the run are not measured, for the next schema."""
        self._left_out = False
        """Whether the schema in the ring says so."""
        self.optimizers: tuple[OptimizerRows, ...] = ()
        """Those that the schema in the ring has rows of, in their order."""
        self._layers: tuple[tuple[Layer, ...], ...] = ()
        """Layers of the plans that the schema in the ring was made of."""
        self._own_layers: Mapping[str, tuple[str, ...]] = {}
        """The own families that it has."""
        self._collections = ""
        """The tensor collections that it has."""
        self._parameters: Mapping[str, str] = {}
        """What it says of parameters."""
        self._begun: _Begun | None = None
        """The newest schema in the ring, the gradients' device, and the order of the layers."""
        self._next_try_seconds = 0.0
        """When to try again for room in shared memory; 0 before any was lacking."""
        self._unfinished: tuple[_Begun, _Beginning] | None = None
        """A schema that may be in the ring although its delivery could not be made."""

    @property
    def written(self) -> bool:
        """Whether there is a schema in the ring that has layers."""
        return bool(self._layers)

    def outlives(self, plans: Sequence[MeasurementPlan]) -> bool:
        """Return whether all that the schema in the ring was made of is gone; `plans` are left."""
        known = {id(layers) for layers in self._layers}
        return bool(known) and known.isdisjoint(id(plan.layers) for plan in plans)

    def delivery_for(self, plans: Sequence[MeasurementPlan], writer: RingWriter) -> Delivery | None:
        """Return the delivery of records of `plans`, once their schema is in the ring.

        None while shared memory has no room for it, which is logged once and tried again later.
        """
        if (
            self.delivery is not None
            and self.own_families == self._own_layers
            and self.leaves_out == self._left_out
            and self._traits.collections == self._collections
            and self._traits.parameters == self._parameters
            and len(plans) == len(self._layers)
            and all(plan.layers is layers for plan, layers in zip(plans, self._layers, strict=True))
        ):
            return self.delivery
        now_seconds = time.monotonic()
        if now_seconds < self._next_try_seconds:
            return None
        try:
            self.delivery = self._begin(plans, writer)
        except OSError as error:
            pass_on(error)
            if error.errno not in SHORTAGES:
                raise
            if not self._next_try_seconds:
                log.warning("steps are not recorded, training goes on: %s", error.strerror)
            self._next_try_seconds = now_seconds + RETRY_SECONDS
            return None
        return self.delivery

    def _begin(self, plans: Sequence[MeasurementPlan], writer: RingWriter) -> Delivery:
        """Write the schema of new plans, or leave that to when those before are in the ring.

        Plans of which the records look the same, as those of the next optimizer of the same
        parameters or of the next model of a sweep, continue the ones before.
        """
        shares = tuple(share for plan in plans for share in plan.shares)
        if self.leaves_out:
            shares += (_share_left_out(writer.identity),)
        own = self.own_families
        schema = Schema(
            step_columns=self._step_columns,
            families=family_columns(
                family for family in self._families if family.of_parameters or family.name in own
            ),
            shares=(*shares, *(_own_share(family, writer.identity) for family in own)),
            layers=(*_layers_of(plans), *_own_layers(own, len(shares))),
            facts=facts_of(plans, self._traits),
        )
        device, order = plans[0].device, _module_order(plans)
        before, begun = self.delivery, (schema, device, order)
        if before is not None and begun == self._begun:
            self._note_made_of(plans, own)
            return before
        begin = _Beginning(writer, schema, self._schedule, device, order)
        if before is not None:
            before.retire()
        if before is not None and before.pending:
            following: Delivery = SucceedingDelivery(
                before, begin, wants_all_layers=not accelerator.is_on_host(device)
            )
        else:
            following = self._begin_now(begun, begin)
        self._begun = begun
        self._traits.reduced_by_ddp |= any("ddp" in plan.strategy for plan in plans)
        for plan in plans:
            for feature in plan.unsupported:
                self._note_unsupported(feature)
        self._note_made_of(plans, own)
        return following

    def _note_made_of(
        self, plans: Sequence[MeasurementPlan], own: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.optimizers = tuple(
            OptimizerRows(label=plan.label, shares=len(plan.shares), layers=len(plan.layers))
            for plan in plans
        )
        if self.leaves_out:
            self.optimizers += (OptimizerRows(label=_LEFT_OUT, shares=1, layers=0),)
        self._left_out = self.leaves_out
        self._layers = tuple(plan.layers for plan in plans)
        self._own_layers = own
        self._collections = self._traits.collections
        self._parameters = self._traits.parameters

    def _begin_now(self, begun: _Begun, begin: "_Beginning") -> Delivery:
        """Begin a schema, or go on where its delivery could not be made the last time."""
        if self._unfinished is None or self._unfinished[0] != begun:
            self._unfinished = begun, begin
        delivery = self._unfinished[1]()
        self._unfinished = None
        return delivery


class _Beginning:
    """Writes a schema, once, and makes its delivery; to be called again where that fails."""

    def __init__(
        self,
        writer: RingWriter,
        schema: Schema,
        schedule: LayerSchedule,
        device: torch.device,
        order: list[int],
    ) -> None:
        self._writer = writer
        self._schema = schema
        self._schedule = schedule
        self._device = device
        self._order = None if order == sorted(order) else order
        self._written = False

    def __call__(self) -> Delivery:
        """Return the delivery."""
        if not self._written:
            slots = device_slots(self._schema, self._device, source_of(self._device))
            self._writer.write_schema(self._schema, device_slots=slots)
            self._written = True
        return make_delivery(self._writer, self._schema, self._schedule, self._device, self._order)


_LEFT_OUT = "left out"


def _share_left_out(rank: RankIdentity) -> Share:
    """Return the share of what is not measured of the run: no rank has a row, so none is whole."""
    return Share(
        group=_LEFT_OUT,
        shard_index=rank.rank,
        shard_count=rank.world_size,
        optimizer=_LEFT_OUT,
        joint=True,
    )


def _own_share(family: str, rank: RankIdentity) -> Share:
    """Return the share of rows that every rank has of its own part of the batch."""
    return Share(group=family, shard_index=rank.rank, shard_count=rank.world_size, family=family)


def _own_layers(own: Mapping[str, tuple[str, ...]], shares: int) -> Iterator[Layer]:
    """Yield the layers of families that are not of parameters; how large varies with the batch."""
    for index, names in enumerate(own.values(), shares):
        for name in names:
            yield Layer(name=name, share=index, elements=0)


def _layers_of(plans: Sequence[MeasurementPlan]) -> tuple[Layer, ...]:
    """Return the layers of all plans, each with the index of its share in the schema."""
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


def measured_families(settings: Settings) -> tuple[ColumnFamily, ...]:
    """Return those that are not switched off, in the order of `FAMILIES`."""
    off = {
        OPTIMIZER: not settings.measure_updates,
        DISTRIBUTION: not settings.measure_distribution,
    }
    return tuple(family for family in FAMILIES if not off.get(family, False))


def measured_step_columns(settings: Settings) -> tuple[str, ...]:
    """Return the step columns of this rank, without those of what is switched off."""
    reduced = () if settings.reduction == "agents" else REDUCED_COLUMNS
    own = step_columns(
        guarded=bool(settings.guard), local_gradients=bool(settings.measure_local_gradients)
    )
    return (*own, *reduced)
