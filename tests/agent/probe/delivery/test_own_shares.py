"""Rows of families with their own shares reach the ring next to those of parameters."""

from collections.abc import Callable
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.probe.delivery.base import Delivery, HostDelivery
from mp_agent.probe.delivery.device import DeviceDelivery
from mp_agent.probe.delivery.transfers import DeviceTransfers
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import ObservedStep
from mp_agent.records.columns import ACTIVATIONS, GRADIENTS, LOGPROBS
from mp_agent.records.schema import Layer, Share
from mp_agent.ring.writer import RingWriter
from tests.agent.probe.rings import make_identity, read_ring
from tests.agent.probe.seen_steps import CPU, SCHEMA, Clock, step

OWN_SCHEMA = replace(
    SCHEMA,
    shares=(*SCHEMA.shares, Share(group="activations", family=ACTIVATIONS.name)),
    layers=(*SCHEMA.layers, *(Layer(name=n, share=2, elements=0) for n in ("inner", "head"))),
)
ROWS = np.array(
    [
        [4.0, -1.0, 14.0, 3.0, 1.0, 0.0, 0.0, 0.0, nan, 2.0, nan],
        [2.0, 5.0, 25.0, 5.0, 0.0, 1.0, 0.0, 0.0, 6.0, 4.0, 3.0],
    ]
)
TOGETHER = [6.0, 4.0, 39.0, 5.0, 1.0, 1.0, 0.0, 0.0, 6.0, 2.0, 3.0]
Make = Callable[[RingWriter], Delivery]


def on_host(writer: RingWriter) -> Delivery:
    return HostDelivery(writer, OWN_SCHEMA, LayerSchedule(1000, DEFAULTS))


def from_device(writer: RingWriter) -> Delivery:
    schedule = LayerSchedule(1000, DEFAULTS)
    transfers = DeviceTransfers(CPU)
    return DeviceDelivery(writer, OWN_SCHEMA, schedule, transfers, device=CPU, gradients_device=CPU)


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    writer = RingWriter.create(tmp_path / "own" / "rank0.ring", make_identity())
    writer.write_schema(OWN_SCHEMA)
    return writer


def own_step(sequence: int, **changes: object) -> ObservedStep:
    seen = replace(step(sequence), own_rows={ACTIVATIONS.name: torch.from_numpy(ROWS.copy())})
    return replace(seen, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [on_host, from_device])
def test_rows_stand_at_their_own_shares_and_layers_only(make: Make, ring, clock: Clock):
    delivery = make(ring)
    delivery.offer(own_step(10), complete=True)
    clock.now = 100
    delivery.collect()

    contents = read_ring(ring.path)
    (record,), (table,) = contents.records, contents.layers
    own, gradients = record.families[ACTIVATIONS.name], record.families[GRADIENTS.name]
    assert own[2].tolist() == pytest.approx(TOGETHER, nan_ok=True)
    assert np.isnan(own[:2]).all() and np.isnan(gradients[2]).all()
    assert gradients[:2].tolist() == step(10).totals_GC.tolist()  # type: ignore[union-attr]
    np.testing.assert_array_equal(table.families[ACTIVATIONS.name][3:], ROWS)
    assert np.isnan(table.families[ACTIVATIONS.name][:3]).all()
    assert (table.families[GRADIENTS.name][:3] == 10.0).all()
    assert np.isnan(table.families[GRADIENTS.name][3:]).all()


@pytest.mark.parametrize("make", [on_host, from_device])
def test_without_gradients_of_layers_there_is_a_table_of_their_own(make: Make, ring, clock: Clock):
    delivery = make(ring)
    delivery.offer(own_step(7, rows_LC=None), complete=True)
    clock.now = 100
    delivery.collect()

    (table,) = read_ring(ring.path).layers
    assert table.families.keys() == {ACTIVATIONS.name}
    np.testing.assert_array_equal(table.families[ACTIVATIONS.name][3:], ROWS)


@pytest.mark.parametrize("make", [on_host, from_device])
def test_a_step_without_them_has_gradients_alone(make: Make, ring, clock: Clock):
    delivery = make(ring)
    delivery.offer(own_step(10), complete=True)
    delivery.offer(step(20), complete=True)
    clock.now = 100
    delivery.collect()

    contents = read_ring(ring.path)
    assert [set(record.families) for record in contents.records][1] == {GRADIENTS.name}
    assert [set(table.families) for table in contents.layers][1] == {GRADIENTS.name}


@pytest.mark.parametrize("make", [on_host, from_device])
def test_rows_of_another_number_of_layers_are_left_out(make: Make, ring, clock: Clock):
    delivery = make(ring)
    delivery.offer(
        own_step(10, own_rows={ACTIVATIONS.name: torch.zeros(5, len(ACTIVATIONS.names))}),
        complete=True,
    )
    clock.now = 100
    delivery.collect()

    assert read_ring(ring.path).records[0].families.keys() == {GRADIENTS.name}


def test_what_finds_no_slot_is_counted_and_the_step_still_comes(ring, clock: Clock):
    delivery = from_device(ring)
    for sequence in range(101, 107):
        delivery.offer(own_step(sequence), complete=True)
    clock.now = 1000
    delivery.collect()

    contents = read_ring(ring.path)
    assert len(contents.records) == 6
    assert sum(ACTIVATIONS.name in record.families for record in contents.records) == 4
    assert contents.state.records_dropped == 2


WITHOUT_LAYERS = replace(
    SCHEMA, shares=(*SCHEMA.shares, Share(group="logprobs", family=LOGPROBS.name))
)


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_family_without_layers_has_its_share_s_row_on_every_step(
    on_device: bool, steps: int, tmp_path: Path, clock: Clock
):
    writer = RingWriter.create(tmp_path / "own" / "rank0.ring", make_identity())
    writer.write_schema(WITHOUT_LAYERS)
    delivery: Delivery = HostDelivery(writer, WITHOUT_LAYERS, LayerSchedule(1000, DEFAULTS))
    if on_device:
        delivery = DeviceDelivery(
            writer,
            WITHOUT_LAYERS,
            LayerSchedule(1000, DEFAULTS),
            DeviceTransfers(CPU),
            device=CPU,
            gradients_device=CPU,
        )
    row_1C = torch.arange(1.0, len(LOGPROBS.names) + 1, dtype=torch.float64).reshape(1, -1)
    for sequence in range(101, 101 + steps):
        rows = {LOGPROBS.name: row_1C * sequence}
        delivery.offer(replace(step(sequence), rows_LC=None, own_rows=rows), complete=True)
    clock.now = 1000
    delivery.collect()

    contents = read_ring(writer.path)
    assert contents.state.records_dropped == 0
    assert [record.sequence for record in contents.records] == list(range(101, 101 + steps))
    for record in contents.records:
        own = record.families[LOGPROBS.name]
        np.testing.assert_array_equal(own[2], row_1C[0].numpy() * record.sequence)
        assert np.isnan(own[:2]).all()
    assert not contents.layers
