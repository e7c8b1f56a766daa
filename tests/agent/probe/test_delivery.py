"""The way from a device to the ring, with events that come when the test says."""

import time
from math import inf, isnan, nan

import numpy as np
import pytest
import torch

from mp_agent.catalog.thresholds import DEFAULTS
from mp_agent.probe.delivery import DeviceDelivery, HostDelivery
from mp_agent.probe.mailbox import Mailbox, PinnedPool
from mp_agent.probe.schedule import LayerSchedule
from mp_agent.probe.step import SeenStep
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, STEP_COLUMN_NAMES
from mp_agent.records.schema import Layer, Schema, Share
from mp_agent.ring.writer import RingWriter
from tests.agent.probe.rings import make_identity, read_ring

CPU = torch.device("cpu")
SCHEMA = Schema(
    step_columns=STEP_COLUMN_NAMES,
    gradient_columns=GRADIENT_COLUMN_NAMES,
    shares=(Share(group="a"), Share(group="b")),
    layers=tuple(Layer(name=f"layer{index}", share=0, elements=4) for index in range(3)),
)


class Clock:
    """Events that have happened once `now` has come to their number."""

    def __init__(self) -> None:
        self.now = 0
        self.marks = 0

    def mark(self, device: torch.device) -> "Mark":
        self.marks += 1
        return Mark(self, self.marks)


class Mark:
    def __init__(self, clock: Clock, number: int) -> None:
        self.clock, self.number = clock, number

    def query(self) -> bool:
        return self.clock.now >= self.number


@pytest.fixture
def writer(tmp_path):
    ring = RingWriter.create(tmp_path / "rings" / "rank0.ring", make_identity())
    ring.write_schema(SCHEMA)
    yield ring
    ring.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def delivery(writer, clock) -> DeviceDelivery:
    schedule = LayerSchedule(1000, DEFAULTS)
    mailbox = Mailbox(CPU, clock.mark)
    return DeviceDelivery(writer, SCHEMA, schedule, mailbox, device=CPU, gradients_device=CPU)


def step(sequence: int, *, nan_elements: float = 0.0, **scalars: object) -> SeenStep:
    totals_GC = torch.arange(12, dtype=torch.float64).reshape(2, 6) + sequence
    totals_GC[:, 3:5] = torch.tensor([nan_elements, 0.0])
    return SeenStep(
        sequence=sequence,
        step=sequence,
        time_unix_ns=sequence,
        scalars=scalars,
        losses=2,
        shares=2,
        totals_GC=totals_GC,
        rows_LC=torch.full((3, 6), float(sequence), dtype=torch.float64),
    )


class TestDeviceDelivery:
    def test_publishes_nothing_before_the_device_is_there(self, delivery, writer, clock):
        delivery.offer(step(5), complete=True)
        delivery.collect()
        assert read_ring(writer.path).records == []
        clock.now = 1
        delivery.collect()
        assert len(read_ring(writer.path).records) == 1

    def test_brings_scalars_of_both_places_and_all_totals(self, delivery, writer, clock):
        seen = step(5, loss=torch.tensor(6.0), loss_scale=torch.tensor(1024.0), learning_rate=0.5)
        delivery.offer(seen, complete=True)
        clock.now = 1
        delivery.collect()
        contents = read_ring(writer.path)
        assert contents.values(0)["loss"] == 3.0
        assert contents.values(0)["loss_scale"] == 1024.0
        assert contents.values(0)["learning_rate"] == 0.5
        np.testing.assert_array_equal(contents.records[0].gradients, seen.totals_GC.numpy())

    @pytest.mark.parametrize("loss", [nan, inf])
    def test_tells_a_loss_that_turns_out_not_finite(self, delivery, writer, clock, loss):
        delivery.offer(step(5, loss=torch.tensor(loss)), complete=True)
        clock.now = 1
        delivery.collect()
        values = read_ring(writer.path).values(0)
        assert values["loss_nonfinite"] == 1.0
        assert "loss" not in values

    def test_takes_what_the_scalar_was_when_offered(self, delivery, writer, clock):
        scale = torch.tensor(1024.0)
        delivery.offer(step(5, loss_scale=scale), complete=True)
        scale.fill_(512.0)
        clock.now = 1
        delivery.collect()
        assert read_ring(writer.path).values(0)["loss_scale"] == 1024.0

    def test_keeps_the_order_of_steps(self, delivery, writer, clock):
        for sequence in range(2, 9):
            delivery.offer(step(sequence), complete=True)
        clock.now = 3
        delivery.collect()
        clock.now = 100
        delivery.collect()
        sequences = [record.sequence for record in read_ring(writer.path).records]
        assert sequences == list(range(2, 9))

    def test_drops_and_counts_steps_that_find_no_slot(self, delivery, writer, clock):
        for sequence in range(201, 271):
            delivery.offer(step(sequence), complete=True)
        clock.now = 1000
        delivery.collect()
        contents = read_ring(writer.path)
        assert len(contents.records) == 64
        assert contents.state.records_dropped == 6

    def test_goes_on_after_slots_were_full(self, delivery, writer, clock):
        for sequence in range(201, 271):
            delivery.offer(step(sequence), complete=True)
        clock.now = 1000
        delivery.collect()
        delivery.offer(step(271), complete=True)
        delivery.collect()
        assert read_ring(writer.path).records[-1].sequence == 271

    def test_sends_layers_that_are_due_ahead_of_their_step(self, delivery, writer, clock):
        delivery.offer(step(10), complete=True)
        clock.now = 1
        delivery.collect()
        contents = read_ring(writer.path)
        assert [table.sequence for table in contents.layers] == [10]
        assert contents.records == []

    def test_sends_kept_layers_once_trouble_has_arrived(self, delivery, writer, clock):
        for sequence in range(2, 8):
            delivery.offer(step(sequence, nan_elements=float(sequence == 4)), complete=True)
        clock.now = 1000
        delivery.collect()
        delivery.collect()
        layers = read_ring(writer.path).layers
        assert [table.sequence for table in layers] == [4]
        assert (layers[0].rows == 4.0).all()

    def test_lets_go_of_layers_older_than_the_history(self, delivery, writer, clock):
        for sequence in range(202, 222):
            delivery.offer(step(sequence, nan_elements=float(sequence == 202)), complete=True)
        clock.now = 1000
        delivery.collect()
        delivery.collect()
        assert read_ring(writer.path).layers == []

    def test_drain_publishes_what_is_open_and_waits_no_longer_than_told(
        self, delivery, writer, clock
    ):
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
        assert contents.open_record.sequence == 6

    def test_passes_on_a_step_without_gradients(self, delivery, writer, clock):
        bare = SeenStep(
            sequence=1,
            step=1,
            time_unix_ns=1,
            scalars={},
            losses=0,
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


class TestHostDelivery:
    def test_writes_a_step_open_and_then_complete(self, writer):
        delivery = HostDelivery(writer)
        delivery.offer(step(1), complete=False)
        contents = read_ring(writer.path)
        assert contents.open_record.sequence == 1
        assert contents.layers == []
        delivery.offer(step(1), complete=True)
        contents = read_ring(writer.path)
        assert contents.open_record is None
        assert [table.sequence for table in contents.layers] == [1]

    def test_drain_writes_the_layers_of_a_step_that_will_not_end(self, writer):
        delivery = HostDelivery(writer)
        delivery.offer(step(1), complete=False)
        delivery.drain(0.0)
        delivery.drain(0.0)
        assert [table.sequence for table in read_ring(writer.path).layers] == [1]


class TestMailbox:
    def test_gives_pieces_back(self, clock):
        pool, mailbox, got = PinnedPool(1, 2, CPU), Mailbox(CPU, clock.mark), []
        for number in range(3):
            assert mailbox.send(pool, torch.full((2,), float(number)), got.append)
            assert not mailbox.send(pool, torch.zeros(2), got.append)
            clock.now += 1
            mailbox.collect()
        assert [values.tolist() for values in got] == [[0, 0], [1, 1], [2, 2]]

    def test_hands_over_copies_that_later_letters_do_not_change(self, clock):
        pool, mailbox, got = PinnedPool(1, 1, CPU), Mailbox(CPU, clock.mark), []
        clock.now = 1000
        for number in (1.0, 2.0):
            mailbox.send(pool, torch.tensor([number]), got.append)
            mailbox.collect()
        assert [values.tolist() for values in got] == [[1.0], [2.0]]


class TestOffloadedGradients:
    """On the host, while losses and scales are on the device."""

    @pytest.fixture
    def delivery(self, writer, clock) -> DeviceDelivery:
        return DeviceDelivery(
            writer,
            SCHEMA,
            LayerSchedule(1000, DEFAULTS),
            Mailbox(CPU, clock.mark),
            device=torch.device("meta"),
            gradients_device=CPU,
        )

    def test_wait_on_the_host_for_the_scalars(self, delivery, writer, clock, monkeypatch):
        sent = []
        original = Mailbox.send

        def send(self, pool, payload_N, then):
            sent.append(payload_N.numel())
            return original(self, pool, torch.full((payload_N.numel(),), 6.0), then)

        monkeypatch.setattr(Mailbox, "send", send)
        seen = step(5, loss=torch.ones((), device="meta"), learning_rate=0.5)
        delivery.offer(seen, complete=True)
        assert sent == [1], "the totals are not sent to the device and back"
        assert read_ring(writer.path).records == []
        clock.now = 1
        delivery.collect()
        contents = read_ring(writer.path)
        assert contents.values(0)["loss"] == 3.0
        np.testing.assert_array_equal(contents.records[0].gradients, seen.totals_GC.numpy())
        np.testing.assert_array_equal(contents.layers[0].rows, seen.rows_LC.numpy())

    def test_are_not_looked_at_layer_by_layer_on_every_step(self, delivery):
        assert not delivery.wants_all_layers
