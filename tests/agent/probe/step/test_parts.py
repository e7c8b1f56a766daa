"""The parts of a step add up to exactly what each was made to take, by a clock of the test's."""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from mp_agent.probe.recording import recorder
from mp_agent.probe.step import boundaries, phases
from tests.agent.probe.small_model import make_loss, make_model

PARTS = ("data", "forward", "backward", "optimizer", "other")


class HostClock:
    """Stands still but for what the test takes: powers of two, so that sums are exact."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def take(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostClock:
    clock = HostClock()
    for module in (phases, boundaries, recorder):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class OwnModel(nn.Module):
    """Of a class outside torch, whose modules torch 2.6 does not compile by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


class Loop:
    """Training in which a forward takes 2 s, a backward 4 s and a step of the optimizer 8 s."""

    def __init__(self, watch, host: HostClock, **settings) -> None:
        self.host, self.watched = host, watch(measure_step_parts=True, **settings)
        self.model = make_model()
        self.model[0].register_forward_hook(lambda *_: host.take(2))
        last = self.model[2]
        assert isinstance(last, nn.Linear)
        last.weight.register_hook(lambda _: host.take(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(lambda *_: host.take(8))

    def loss(self) -> torch.Tensor:
        return make_loss(self.model)

    def step(self, *, data: float = 1) -> None:
        self.host.take(data)
        self.loss().backward()
        self.optimizer.step()

    def parts(self, index: int = -1) -> dict[str, float]:
        """Return the known parts of a step; they add up to it."""
        contents = self.watched.read()
        assert contents.state.probe_errors == 0
        values = contents.values(index)
        found = {part: values[f"{part}_seconds"] for part in PARTS if f"{part}_seconds" in values}
        if "step_seconds" in values:
            assert sum(found.values()) == values["step_seconds"]
        return found


@pytest.fixture
def loop(watch, host) -> Loop:
    """A loop that has made its first step, which shows whose forward it is."""
    started = Loop(watch, host)
    started.step()
    return started


class TestParts:
    def test_of_a_plain_step(self, loop):
        loop.step(data=32)
        assert loop.parts() == {"data": 32, "forward": 2, "backward": 4, "optimizer": 8, "other": 0}

    def test_of_the_first_step_are_those_that_were_seen(self, loop):
        assert loop.parts(0) == {"backward": 4, "optimizer": 8}

    def test_include_the_loss_in_the_forward(self, loop):
        loss = loop.loss()
        loop.host.take(16)
        loss.backward()
        loop.optimizer.step()
        assert loop.parts()["forward"] == 18

    def test_are_summed_over_micro_batches(self, loop):
        for data in (1, 16, 64):
            loop.host.take(data)
            (loop.loss() / 3).backward()
        loop.host.take(128)
        loop.optimizer.step()
        assert loop.parts() == {
            "data": 81,
            "forward": 6,
            "backward": 12,
            "optimizer": 8,
            "other": 128,
        }

    def test_count_clipping_as_optimizer(self, loop):
        loop.loss().backward()
        clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.host.take(16)
        loop.optimizer.step()
        assert loop.parts()["optimizer"] == 24

    def test_leave_out_what_was_clipped_and_not_used(self, loop):
        loop.loss().backward()
        clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.host.take(64)
        loop.optimizer.zero_grad()
        loop.step()
        expected = {"data": 0, "forward": 4, "backward": 8, "optimizer": 8, "other": 65}
        assert loop.parts() == expected

    def test_count_two_forwards_before_a_backward(self, loop):
        (loop.loss() + loop.loss()).backward()
        loop.optimizer.step()
        assert loop.parts()["forward"] == 4

    def test_count_a_second_backward_of_one_forward(self, loop):
        loss = loop.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        loop.optimizer.step()
        assert loop.parts() == {"data": 0, "forward": 2, "backward": 8, "optimizer": 8, "other": 0}

    def test_count_what_backward_computes_again_as_backward(self, loop):
        inputs = torch.ones(3, 4, requires_grad=True)
        checkpoint(loop.model, inputs, use_reentrant=False).sum().backward()
        loop.optimizer.step()
        assert loop.parts() == {"data": 0, "forward": 2, "backward": 6, "optimizer": 8, "other": 0}

    def test_go_on_after_a_forward_that_raised(self, loop):
        handle = loop.model[2].register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            loop.loss()
        handle.remove()
        loop.step()
        loop.step()
        assert loop.parts(1)["backward"] == 4
        assert loop.parts() == {"data": 1, "forward": 2, "backward": 4, "optimizer": 8, "other": 0}

    def test_of_a_step_that_the_scaler_skipped(self, loop):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        loop.host.take(16)
        scaler.scale(loop.loss() * torch.inf).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        assert loop.watched.read().values(-1)["skipped"] == 1.0
        expected = {"data": 16, "forward": 2, "backward": 4, "optimizer": 0, "other": 0}
        assert loop.parts() == expected


class TestEvaluation:
    def test_without_gradients_is_no_part(self, loop):
        loop.host.take(1)
        with torch.no_grad():
            loop.loss()
            loop.host.take(64)
        loop.step()
        assert loop.parts() == {"data": 2, "forward": 2, "backward": 4, "optimizer": 8, "other": 66}

    def test_in_evaluation_mode_is_no_part(self, loop):
        loop.model.eval()
        loop.loss()
        loop.model.train()
        loop.step()
        assert loop.parts() == {"data": 1, "forward": 2, "backward": 4, "optimizer": 8, "other": 2}

    def test_is_no_part_between_micro_batches(self, loop):
        loop.loss().backward()
        with torch.no_grad():
            loop.loss()
        loop.step()
        assert loop.parts() == {"data": 1, "forward": 4, "backward": 8, "optimizer": 8, "other": 2}

    def test_checkpoints_and_named_phases_are_no_part(self, loop, monkeypatch):
        with loop.watched.probe.phase("rollout"):
            loop.loss()
        monkeypatch.setattr(torch.serialization, "_save", lambda *_, **__: loop.host.take(64))
        torch.save(loop.model.state_dict(), io.BytesIO())
        loop.step()
        assert loop.parts() == {"data": 1, "forward": 2, "backward": 4, "optimizer": 8, "other": 66}


class TestOptimizers:
    def test_that_call_a_closure_several_times_leave_its_passes_to_the_other_parts(
        self, watch, host
    ):
        loop = Loop(watch, host)
        optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)
        calls = []

        def closure() -> torch.Tensor:
            calls.append(1)
            loop.host.take(16)
            optimizer.zero_grad()
            loss = loop.loss()
            loss.backward()
            return loss

        for _ in range(2):
            calls.clear()
            optimizer.step(closure)
        count = len(calls)
        assert count > 1
        assert loop.parts() == {
            "data": 16,
            "forward": 2 * count,
            "backward": 4 * count,
            "optimizer": 16 * (count - 1),
            "other": 0,
        }

    def test_of_one_model_are_both_optimizer(self, watch, host):
        loop = Loop(watch, host)
        halves = loop.model[0].parameters(), loop.model[2].parameters()
        loop.optimizer, second = (torch.optim.SGD(half, lr=0.1) for half in halves)
        loop.optimizer.register_step_pre_hook(lambda *_: host.take(8))
        second.register_step_pre_hook(lambda *_: host.take(16))
        for _ in range(4):
            loop.step()
            second.step()
        assert loop.parts() == {"data": 1, "forward": 2, "backward": 4, "optimizer": 24, "other": 0}


class TestForward:
    def test_of_a_compiled_model_is_seen_where_the_wrapper_is_called(self, watch, host):
        watched, graphs = watch(measure_step_parts=True), []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        inner = make_model()
        model = torch.compile(inner, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(3):
            host.take(32)
            loss = model(torch.ones(3, 4)).sum()
            host.take(2)
            loss.backward()
            optimizer.step()
        values = watched.read().values(-1)
        assert (values["data_seconds"], values["forward_seconds"]) == (32, 2)
        assert len(graphs) == 1

    def test_that_is_hidden_leaves_out_data_and_forward(self, loop):
        loop.host.take(32)
        loop.model[2](loop.model[0](torch.ones(3, 4))).sum().backward()
        loop.optimizer.step()
        assert loop.parts() == {"backward": 4, "optimizer": 8, "other": 34}

    def test_is_left_out_if_its_backward_was_not_seen(self, loop):
        weights = list(loop.model.parameters())
        loop.host.take(32)
        for weight, gradient in zip(
            weights, torch.autograd.grad(loop.loss(), weights), strict=True
        ):
            weight.grad = gradient
        loop.optimizer.step()
        assert loop.parts() == {"data": 32, "optimizer": 8, "other": 6}

    def test_on_another_thread_is_none_of_the_step(self, loop):
        thread = threading.Thread(target=loop.loss)
        thread.start()
        thread.join()
        loop.host.take(32)
        loop.step()
        assert loop.parts()["data"] == 35
        assert loop.parts()["forward"] == 2

    def test_of_copies_and_after_detaching_has_no_hook_of_ours(self, loop):
        assert len(loop.model._forward_pre_hooks) == 1
        copied = copy.deepcopy(nn.Sequential(nn.Linear(4, 2)))
        copied._forward_pre_hooks = copy.deepcopy(loop.model._forward_pre_hooks)
        loop.host.take(16)
        copied(torch.ones(3, 4))
        loop.host.take(16)
        loop.step()
        assert loop.parts()["data"] == 33
        loop.watched.probe.detach()
        assert not loop.model._forward_pre_hooks

    def test_of_a_model_that_is_compiled_in_place_is_hidden_and_compiled_once(self, watch, host):
        watched, graphs = watch(measure_step_parts=True), []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model = OwnModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        make_loss(model).backward()
        optimizer.step()
        assert model._forward_pre_hooks, "the hook is there before the compiler"
        model.compile(backend=backend, fullgraph=True)
        for _ in range(3):
            host.take(32)
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        contents = watched.read()
        assert "data_seconds" not in contents.values(-1)
        assert contents.values(-1)["other_seconds"] == 32
        assert len(graphs) == 1
        assert contents.state.probe_errors == 0


def _fail(*_: object) -> None:
    raise ZeroDivisionError
