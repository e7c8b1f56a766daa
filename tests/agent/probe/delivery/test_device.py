"""The way from a device to the ring, with copies that come when the test says."""

import time
from dataclasses import replace
from math import inf, isnan, nan

import numpy as np
import pytest
import torch

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.probe.delivery.device import DeviceDelivery
from mp_agent.probe.delivery.transfers import DeviceTransfers
from mp_agent.probe.step.layer_schedule import LayerSchedule
from mp_agent.probe.step.open_step import ObservedStep, UnreadScale
from mp_agent.records.columns import GRADIENT_COLUMNS, OPTIMIZER
from tests.agent.probe.rings import read_ring
from tests.agent.probe.seen_steps import CPU, SCHEMA, step


@pytest.fixture
def delivery(writer, clock) -> DeviceDelivery:
    schedule = LayerSchedule(1000, DEFAULTS)
    transfers = DeviceTransfers(CPU)
    return DeviceDelivery(writer, SCHEMA, schedule, transfers, device=CPU, gradients_device=CPU)


def test_publishes_nothing_before_the_device_is_there(delivery, writer, clock):
    delivery.offer(step(5), complete=True)
    delivery.collect()
    assert read_ring(writer.path).records == []
    clock.now = 1
    delivery.collect()
    assert len(read_ring(writer.path).records) == 1


def test_brings_scalars_of_both_places_and_all_totals(delivery, writer, clock):
    seen = step(5, loss=torch.tensor(6.0), loss_scale=torch.tensor(1024.0), learning_rate=0.5)
    delivery.offer(seen, complete=True)
    clock.now = 1
    delivery.collect()
    contents = read_ring(writer.path)
    assert contents.values(0)["loss"] == 6.0
    assert contents.values(0)["loss_scale"] == 1024.0
    assert contents.values(0)["learning_rate"] == 0.5
    assert seen.totals_GC is not None
    np.testing.assert_array_equal(contents.records[0].gradients, seen.totals_GC.numpy())


@pytest.mark.parametrize("loss", [nan, inf])
def test_reports_a_loss_that_turns_out_not_finite(delivery, writer, clock, loss):
    delivery.offer(step(5, loss=torch.tensor(loss)), complete=True)
    clock.now = 1
    delivery.collect()
    values = read_ring(writer.path).values(0)
    assert values["loss_nonfinite"] == 1.0
    assert "loss" not in values


def test_takes_what_the_scalar_was_when_offered(delivery, writer, clock):
    scale = torch.tensor(1024.0)
    delivery.offer(step(5, loss_scale=scale), complete=True)
    scale.fill_(512.0)
    clock.now = 1
    delivery.collect()
    assert read_ring(writer.path).values(0)["loss_scale"] == 1024.0


def test_keeps_the_order_of_steps(delivery, writer, clock):
    for sequence in range(2, 9):
        delivery.offer(step(sequence), complete=True)
    clock.now = 3
    delivery.collect()
    clock.now = 100
    delivery.collect()
    sequences = [record.sequence for record in read_ring(writer.path).records]
    assert sequences == list(range(2, 9))


def test_drops_and_counts_steps_that_find_no_slot(delivery, writer, clock):
    for sequence in range(201, 271):
        delivery.offer(step(sequence), complete=True)
    clock.now = 1000
    delivery.collect()
    contents = read_ring(writer.path)
    assert len(contents.records) == 64
    assert contents.state.records_dropped == 6


def test_goes_on_after_slots_were_full(delivery, writer, clock):
    for sequence in range(201, 271):
        delivery.offer(step(sequence), complete=True)
    clock.now = 1000
    delivery.collect()
    delivery.offer(step(271), complete=True)
    delivery.collect()
    assert read_ring(writer.path).records[-1].sequence == 271


def test_sends_layers_that_are_due_ahead_of_their_step(delivery, writer, clock):
    delivery.offer(step(10), complete=True)
    clock.now = 1
    delivery.collect()
    contents = read_ring(writer.path)
    assert [table.sequence for table in contents.layers] == [10]
    assert contents.records == []


def with_updates(sequence: int) -> ObservedStep:
    """A step on which another family was measured: 2 shares and 3 layers."""
    columns = len(OPTIMIZER.names)
    totals_GC = torch.arange(2 * columns, dtype=torch.float64).reshape(2, columns)
    rows_LC = torch.arange(3 * columns, dtype=torch.float64).reshape(3, columns) + 1000
    return replace(step(sequence), sampled={OPTIMIZER.name: (totals_GC, rows_LC)})


def test_brings_other_families_with_their_step_and_its_layers(delivery, writer, clock):
    seen = with_updates(10)
    delivery.offer(seen, complete=True)
    clock.now = 2
    delivery.collect()
    assert read_ring(writer.path).records == [], "the step itself comes last"
    clock.now = 3
    delivery.collect()
    contents = read_ring(writer.path)
    totals_GC, rows_LC = seen.sampled[OPTIMIZER.name]
    found = contents.records[0].families[OPTIMIZER.name]
    np.testing.assert_array_equal(found, totals_GC.numpy())
    np.testing.assert_array_equal(contents.layers[0].families[OPTIMIZER.name], rows_LC.numpy())


def test_counts_other_families_that_find_no_slot_and_brings_the_step(delivery, writer, clock):
    for sequence in (10, 20, 30):
        delivery.offer(with_updates(sequence), complete=True)
    clock.now = 1000
    delivery.collect()
    contents = read_ring(writer.path)
    measured = [OPTIMIZER.name in record.families for record in contents.records]
    assert measured == [True, True, False]
    never_offered = 9 + 9
    assert contents.state.records_dropped == never_offered + 1


def test_sends_kept_layers_once_trouble_has_arrived(delivery, writer, clock):
    for sequence in range(2, 8):
        delivery.offer(step(sequence, nan_elements=float(sequence == 4)), complete=True)
    clock.now = 1000
    delivery.collect()
    delivery.collect()
    layers = read_ring(writer.path).layers
    assert [table.sequence for table in layers] == [4]
    assert (layers[0].gradients == 4.0).all()


def test_lets_go_of_layers_older_than_the_history(delivery, writer, clock):
    for sequence in range(202, 222):
        delivery.offer(step(sequence, nan_elements=float(sequence == 202)), complete=True)
    clock.now = 1000
    delivery.collect()
    delivery.collect()
    assert read_ring(writer.path).layers == []


def test_drain_publishes_what_is_open_and_waits_no_longer_than_asked(delivery, writer, clock):
    delivery.offer(step(5), complete=True)
    delivery.offer(step(6), complete=False)
    begun = time.monotonic()
    delivery.drain(0.05)
    assert time.monotonic() - begun >= 0.05
    assert read_ring(writer.path).records == []
    clock.now = 1000
    delivery.drain(0.05)
    contents = read_ring(writer.path)
    assert [record.sequence for record in contents.records] == [5]
    assert contents.open_record is not None and contents.open_record.sequence == 6


def test_passes_on_a_step_without_gradients(delivery, writer, clock):
    bare = ObservedStep(
        sequence=1,
        step=1,
        time_unix_ns=1,
        scalars={},
        shares=2,
        totals_GC=None,
        rows_LC=None,
    )
    delivery.offer(bare, complete=True)
    clock.now = 1
    delivery.collect()
    contents = read_ring(writer.path)
    assert np.isnan(contents.records[0].gradients).all()
    assert isnan(contents.records[0].values[0])


class TestOffloadedGradients:
    """On the host, while losses and scales are on the device."""

    @pytest.fixture
    def delivery(self, writer, clock) -> DeviceDelivery:
        return DeviceDelivery(
            writer,
            SCHEMA,
            LayerSchedule(1000, DEFAULTS),
            DeviceTransfers(CPU),
            device=torch.device("meta"),
            gradients_device=CPU,
        )

    def test_wait_on_the_host_for_the_scalars(self, delivery, writer, clock, monkeypatch):
        sent = []
        original = DeviceTransfers.send

        def send(self, slots, payload_N, then, lose):
            sent.append(payload_N.numel())
            arriving = torch.full((payload_N.numel(),), 6.0, dtype=torch.float64)
            return original(self, slots, arriving, then, lose)

        monkeypatch.setattr(DeviceTransfers, "send", send)
        seen = step(5, loss=torch.ones((), device="meta"), learning_rate=0.5)
        delivery.offer(seen, complete=True)
        assert sent == [1], "the totals are not sent to the device and back"
        assert read_ring(writer.path).records == []
        clock.now = 1
        delivery.collect()
        contents = read_ring(writer.path)
        assert contents.values(0)["loss"] == 6.0
        assert seen.totals_GC is not None and seen.rows_LC is not None
        np.testing.assert_array_equal(contents.records[0].gradients, seen.totals_GC.numpy())
        np.testing.assert_array_equal(contents.layers[0].gradients, seen.rows_LC.numpy())

    def test_are_unscaled_once_the_scale_has_come(self, delivery, writer, clock, monkeypatch):
        original = DeviceTransfers.send

        def send(self, slots, payload_N, then, lose):
            return original(self, slots, torch.tensor([0.5], dtype=torch.float64), then, lose)

        monkeypatch.setattr(DeviceTransfers, "send", send)
        scale = torch.ones((), device="meta", dtype=torch.float64)
        unread = UnreadScale(inverse_scale=scale, totals_rows=slice(1, 2), layer_rows=slice(0, 2))
        seen = replace(step(5), unread_scales=[unread])
        delivery.offer(seen, complete=True)
        clock.now = 1
        delivery.collect()
        contents = read_ring(writer.path)
        powers = np.array([column.unscaling.value for column in GRADIENT_COLUMNS])
        assert seen.totals_GC is not None and seen.rows_LC is not None
        totals_GC, rows_LC = seen.totals_GC.numpy(), seen.rows_LC.numpy()
        np.testing.assert_array_equal(contents.records[0].gradients[0], totals_GC[0])
        np.testing.assert_array_equal(contents.records[0].gradients[1], totals_GC[1] * 0.5**powers)
        np.testing.assert_array_equal(contents.layers[0].gradients[:2], rows_LC[:2] * 0.5**powers)
        np.testing.assert_array_equal(contents.layers[0].gradients[2], rows_LC[2])

    def test_are_not_looked_at_layer_by_layer_on_every_step(self, delivery):
        assert not delivery.wants_all_layers
