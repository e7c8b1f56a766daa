"""Training loops on a simulated device: what arrives, when, and what it was at that moment."""

import gc
import weakref
from collections import deque
from math import inf, isnan, nan, sqrt
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mp_agent.probe import accelerator
from mp_agent.probe.delivery import base, transfers
from mp_agent.probe.optimizers import live_objects
from mp_agent.probe.optimizers.plan import make_plan
from tests.agent.probe.rings import read_ring
from tests.agent.probe.simulated_device import SimulatedDevice
from tests.agent.probe.small_model import make_loss, make_model, sum_squares


class Loop:
    """Trains a small model, and keeps the sums of squares that its gradients had."""

    def __init__(self) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.sums: list[float] = []

    def step(self, device: SimulatedDevice | None = None) -> None:
        make_loss(self.model, len(self.sums)).backward()
        self.sums.append(sum_squares(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if device is not None:
            device.run()


def sums_of(contents) -> list[float]:
    return [contents.gradients(index)["sum_squares"] for index in range(len(contents.records))]


class TestArrival:
    @pytest.mark.parametrize("event", ["backward", "observe", "phase", "scale", "eval"])
    def test_steps_that_the_device_has_finished_are_published_at_the_next_event(
        self, watch, device, event
    ):
        watched, loop = watch(), Loop()
        for _ in range(3):
            loop.step(device)
        if event == "backward":
            make_loss(loop.model).backward()
        elif event == "observe":
            watched.probe.observe(tokens=1)
        elif event == "scale":
            torch.amp.GradScaler("cpu").scale(make_loss(loop.model))
        elif event == "eval":
            loop.model.eval()
            with torch.no_grad():
                make_loss(loop.model)
        else:
            with watched.probe.phase("report"):
                pass
        contents = watched.read()
        assert len(contents.records) == 3
        assert sums_of(contents) == pytest.approx(loop.sums)

    def test_what_arrived_before_the_device_failed_is_published_and_no_rank_is_blamed(
        self, watch, device, caplog
    ):
        watched, loop = watch(), Loop()
        for _ in range(3):
            loop.step()
        device.run()
        device.fail()
        with caplog.at_level("WARNING", "mp_agent"):
            for _ in range(15):
                loop.step()
            watched.probe.flush()
        contents = watched.read()
        assert sums_of(contents)[:3] == pytest.approx(loop.sums[:3])
        assert contents.state.probe_errors == 0
        assert contents.state.unsupported == ("steps after an error of the device",)
        messages = [record.getMessage() for record in caplog.records]
        assert sum("device-side assert" in message for message in messages) == 1
        assert not any("the probe failed" in message for message in messages)

    @pytest.mark.parametrize("registers", [True, False])
    def test_so_is_a_step_with_trouble_whose_layers_cannot_be_asked_for_any_more(
        self, watch, device, registers
    ):
        device.refuses = not registers
        watched, loop = watch(), Loop()
        for _ in range(2):
            loop.step()
        (make_loss(loop.model) * nan).backward()
        loop.optimizer.step()
        device.run()
        device.fail()
        watched.probe.flush()
        contents = watched.read()
        assert [record.sequence for record in contents.records] == [1, 2, 3]
        assert contents.gradients(2)["nan_elements"] == 58.0
        tables = [1, 3] if registers else [1]
        assert [table.sequence for table in contents.layers] == tables
        assert contents.state.probe_errors == 0

    def test_no_weights_and_no_gradients_are_blamed_for_a_device_that_failed(self, watch, device):
        watched, loop = watch(), Loop()
        for _ in range(9):
            loop.step(device)
        make_loss(loop.model).backward()
        loop.optimizer.zero_grad()
        device.fail()
        for _ in range(3):
            loop.step()  # one of them is sampled
        watched.probe.flush()
        assert watched.state().unsupported == ("steps after an error of the device",)

    @pytest.mark.parametrize(("loss", "recorded"), [(nan, True), (inf, True), (1.0, False)])
    def test_a_loop_that_stops_at_a_loss_leaves_it_if_it_is_not_finite(
        self, watch, device, loss, recorded
    ):
        watched, loop = watch(), Loop()
        loop.step(device)
        (make_loss(loop.model) * loss).backward()
        watched.probe.flush()
        contents = watched.read()
        assert len(contents.records) == 1
        assert (contents.open_record is not None) == recorded
        if contents.open_record is not None:
            flag = contents.schema.step_columns.index("loss_nonfinite")
            assert contents.open_record.values[flag] == 1.0


class TestWhatWasInForce:
    def test_the_loss_scale_is_that_before_the_update(self, watch, device):
        watched, loop = watch(), Loop()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        in_force = []
        for number in range(4):
            loss = make_loss(loop.model, number)
            scaled = scaler.scale(loss)
            in_force.append(scaler.get_scale())
            scaled.backward()
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
            device.run()
        watched.probe.flush()
        assert in_force == [256.0, 512.0, 1024.0, 2048.0]
        assert watched.read().column("loss_scale") == in_force

    def test_of_an_optimizer_that_steps_rarely_too(self, watch, device):
        """The record then waits for the second optimizer, which updates come before."""
        watched = watch()
        models = [make_model(seed) for seed in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
        in_force = []
        for number in range(8):
            scaled = scaler.scale(make_loss(models[0], number))
            in_force.append(scaler.get_scale())
            scaled.backward()
            scaler.step(optimizers[0])
            optimizers[0].zero_grad()
            if number % 2 == 0:
                scaler.scale(make_loss(models[1], number)).backward()
                scaler.step(optimizers[1])
                optimizers[1].zero_grad()
            scaler.update()
            device.run()
        watched.probe.flush()
        contents = read_ring(watched.writer.path, one_schema=False)
        assert contents.column("loss_scale") == in_force

    def test_observed_losses_and_learning_rates_are_those_at_the_moment(self, watch, device):
        watched, loop = watch(), Loop()
        running = torch.zeros((), dtype=torch.float64)
        rate = torch.tensor(0.5, dtype=torch.float64)
        for group in loop.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(3):
            make_loss(loop.model, 1).backward()
            running += 1.0
            watched.probe.observe(loss=running)
            running += 100.0
            loop.optimizer.step()
            rate *= 0.5
            loop.optimizer.zero_grad()
            device.run()
        watched.probe.flush()
        contents = watched.read()
        assert contents.column("loss") == [1.0, 102.0, 203.0]
        assert contents.column("learning_rate") == [0.5, 0.25, 0.125]

    def test_a_step_number_that_is_on_the_device_is_not_waited_for(self, watch, device):
        watched, loop = watch(), Loop()
        watched.probe.observe(step=torch.tensor(7), loss=2.0, tokens=3)
        loop.step(device)
        watched.probe.flush()
        contents = watched.read()
        assert contents.records[0].step == 1
        assert contents.column("loss") == [2.0]
        assert contents.column("tokens") == [3.0]
        assert contents.state.unsupported == ("observe(step=…) of a tensor on a GPU",)


class TestSeveralDevices:
    def test_the_device_with_most_elements_is_measured(self):
        with FakeTensorMode():
            model = nn.Module()
            model.scale = nn.Parameter(torch.ones(()))
            model.weight = nn.Parameter(torch.empty(64, 64, device="cuda:0"))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            plan = make_plan(optimizer, live_objects.walk(), model, 1, "")
        assert plan.device == torch.device("cuda:0")
        assert [layer.name for layer in plan.layers] == ["weight"]
        assert plan.unsupported == ("parameters on several devices",)

    def test_another_kind_of_device_is_reported_once_and_its_steps_are_counted(
        self, watch, device, monkeypatch
    ):
        monkeypatch.setattr(accelerator, "is_supported", lambda place: False)
        watched, loop = watch(), Loop()
        for _ in range(12):
            loop.step()
        watched.probe.flush()
        contents = watched.read()
        assert contents.state.unsupported == ("gradients on devices of type cpu",)
        assert contents.state.probe_errors == 0
        assert len(contents.records) == 12
        assert all(isnan(value) for value in sums_of(contents))


class TestStreams:
    def test_streams_have_scratches_of_their_own(self, watch, device):
        watched, loop = watch(), Loop()
        seen = []
        for stream in ("one", "two", "one"):
            device.stream = stream
            loop.step(device)
            kept = watched.probe._recorder._step_measurement._measures._statistics
            seen.append(len(kept))
        watched.probe.flush()
        assert seen == [1, 2, 2]
        assert sums_of(watched.read()) == pytest.approx(loop.sums)

    def test_a_script_with_ever_new_streams_keeps_a_few_scratches(self, watch, device):
        watched, loop = watch(), Loop()
        for stream in range(20):
            device.stream = stream
            loop.step(device)
        kept = watched.probe._recorder._step_measurement._measures._statistics
        assert len(kept) == 4

    def test_what_was_measured_on_another_stream_is_waited_for_there(self, watch, device):
        watch()
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        parts = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
        for _ in range(4):
            device.stream = "one"
            model(torch.ones(2, 4)).sum().backward()
            for stream, optimizer in zip(("one", "two"), parts, strict=True):
                device.stream = stream
                optimizer.step()
            device.run()
        assert ("two", "one") in device.waits


class TestPlans:
    def test_a_change_of_plan_neither_waits_nor_loses_what_is_on_its_way(
        self, watch, device, monkeypatch
    ):
        monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
        watch()
        loop = Loop()
        for _ in range(3):
            loop.step()
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        for _ in range(3):
            loop.step()
        assert device.queued >= 3

    def test_steps_of_both_plans_come_in_order(self, watch, device):
        watched, loop = watch(), Loop()
        for _ in range(3):
            loop.step()
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        for _ in range(3):
            loop.step()
        watched.probe.flush()
        contents = read_ring(watched.writer.path, one_schema=False)
        assert [record.sequence for record in contents.records] == [1, 2, 3, 4, 5, 6]
        assert sums_of(contents) == pytest.approx(loop.sums)
        assert contents.state.records_dropped == 0

    def test_the_delivery_before_is_let_go_of(self, watch, device):
        """It keeps memory of the host and of the device: of a sweep there would be many."""
        watched, loop = watch(), Loop()
        before = []
        for _ in range(4):
            loop.step()
            before.append(weakref.ref(watched.probe._recorder._schema.delivery))
            loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
            loop.step()
            device.run()
            loop.step(device)
        watched.probe.flush()
        gc.collect()
        assert [reference() for reference in before] == [None] * 4

    @pytest.mark.slow
    def test_plans_that_change_faster_than_the_device_follows_pile_up_no_steps(
        self, watch, device, monkeypatch
    ):
        monkeypatch.setattr("mp_agent.ring.writer.BYTES_KEPT", 1 << 30)
        watched, loop = watch(layer_interval=1000), Loop()
        behind: deque[int] = deque([0] * 30)
        pending = []
        for number in range(150):
            if number % 3 == 0:
                loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
            before = device.queued
            loop.step()
            behind.append(device.queued - before)
            device.run(behind.popleft())
            pending.append(watched.probe._recorder._schema.delivery.pending)
        watched.probe.flush()
        contents = read_ring(watched.writer.path, one_schema=False)
        sequences = [record.sequence for record in contents.records]
        assert max(pending) <= 2 * 64
        assert sequences == sorted(set(sequences))
        expected = [loop.sums[sequence - 1] for sequence in sequences]
        assert sums_of(contents) == pytest.approx(expected)
        assert len(sequences) + contents.state.records_dropped >= 150, "what is lost is counted"

    def test_the_end_waits_once_however_many_plans_are_on_their_way(
        self, watch, device, monkeypatch
    ):
        waited: list[float] = []
        clock = SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append)
        monkeypatch.setattr(transfers, "time", clock)
        monkeypatch.setattr(base, "time", clock)
        watched, loop = watch(), Loop()
        for _ in range(5):
            loop.step()
            loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        loop.step()
        watched.probe.flush()
        assert 0.9 < sum(waited) < 1.1

    def test_a_step_that_finds_no_place_leaves_nothing_on_its_way(self, watch, device):
        """Not even its layers: they might come when the memory is another schema's."""
        watched, loop = watch(layer_interval=1000), Loop()
        for _ in range(64):
            loop.step()
        queued, dropped = device.queued, watched.state().records_dropped
        loop.step()
        assert device.queued == queued
        assert watched.state().records_dropped == dropped + 1

    def test_what_never_arrives_is_counted(self, watch, device, monkeypatch):
        monkeypatch.setattr(base, "_HELD_AT_MOST", 3)
        watched, loop = watch(layer_interval=1000), Loop()
        for _ in range(3):
            loop.step()
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
        for _ in range(4):
            loop.step()
            device._queue.clear()
        state = watched.state()
        assert state.records_dropped == 4, "three steps, and the layers of the first"

    def test_a_pool_that_cannot_be_made_leaves_one_schema_in_the_ring(
        self, watch, device, monkeypatch
    ):
        def refuse(*_: object) -> None:
            raise RuntimeError("no pinned memory")

        monkeypatch.setattr(accelerator, "pinned_zeros", refuse)
        watched, loop = watch(), Loop()
        for _ in range(6):
            loop.step()
        assert watched.writer._state.generation == 1

    def test_layers_that_find_no_place_are_counted(self, watch, device):
        watched, loop = watch(layer_interval=1), Loop()
        for _ in range(7):
            loop.step()
        device.run()
        watched.probe.flush()
        contents = watched.read()
        assert len(contents.layers) == 4
        assert len(contents.records) == 7
        assert contents.state.records_dropped == 3


def test_numbers_are_those_of_the_processor(watch, device):
    watched, loop = watch(), Loop()
    for _ in range(12):
        loop.step(device)
    watched.probe.flush()
    contents = watched.read()
    norms = [sqrt(value) for value in sums_of(contents)]
    assert norms == pytest.approx([sqrt(value) for value in loop.sums], rel=1e-6)
    assert contents.state.probe_errors == 0
    assert contents.state.records_dropped == 0
