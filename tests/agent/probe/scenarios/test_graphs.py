"""Steps that are replayed from a CUDA graph: counted, with the loss that the trainer gives."""

from math import isnan, nan
from threading import Thread

import pytest
import torch

from mp_agent.probe.tracker.optimizer_steps import UNSEEN
from mp_agent.records.steps import Phase
from tests.agent.probe.small_model import make_loss, make_model, sum_squares


class Graph:
    """Stands for `torch.cuda.CUDAGraph`, whose replay calls none of the hooks."""

    def capture_begin(self) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


class Loop:
    """Three ordinary steps, then one that is captured."""

    def __init__(self, device) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.graph = Graph()
        for _ in range(3):
            self.step()
            device.run()
        self.graph.capture_begin()
        device.capturing = True
        self.step()
        device.capturing = False
        self.graph.capture_end()

    def step(self) -> None:
        make_loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)


def test_every_replay_is_a_step_and_its_loss_the_one_observed_after_it(watch, device):
    watched, loop = watch(), Loop(device)
    for number in range(50):
        loop.graph.replay()
        watched.probe.observe(loss=float(number))
        device.run()
    watched.probe.flush()
    contents = watched.read()
    assert len(contents.records) == 53
    assert contents.column("loss")[3:] == [float(number) for number in range(50)]
    assert all(isnan(contents.gradients(index)["sum_squares"]) for index in range(3, 53))
    assert set(contents.state.unsupported) == {
        "CUDA graph capture",
        "gradients of steps in CUDA graphs",
    }
    assert contents.state.probe_errors == 0


def test_gradients_of_a_replayed_backward_are_measured_and_its_loss_is_named(watch, device):
    """torchtitan's default: forward and backward are replayed, clipping and the step are not."""
    watched, model, graph = watch(), make_model(), Graph()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = make_loss(model)
    loss.backward()
    optimizer.step()
    device.run()
    graph.capture_begin()
    device.capturing = True
    make_loss(model).backward()
    device.capturing = False
    graph.capture_end()
    squares = []
    for number in range(1, 4):
        graph.replay()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(number)
        squares.append(sum_squares(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        device.run()
    watched.probe.flush()
    contents = watched.read()
    seen = [contents.gradients(index)["sum_squares"] for index in (1, 2, 3)]
    assert seen == pytest.approx(squares)
    assert all(isnan(loss) for loss in contents.column("loss")[1:])
    assert contents.column("clip_max_norm")[1:] == [0.5] * 3
    assert set(contents.state.unsupported) == {"CUDA graph capture", UNSEEN}
    assert contents.state.probe_errors == 0


def test_a_replayed_backward_writes_new_gradients_into_the_same_tensors(watch, device):
    watched, model, graph = watch(), make_model(), Graph()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    by_backward, by_replay, by_nothing = "backward", "replay", ""
    for made in (*[by_backward] * 3, *[by_replay] * 2, by_backward, by_nothing):
        if made == by_backward:
            model.zero_grad()
            make_loss(model).backward()
        elif made == by_replay:
            graph.replay()
        optimizer.step()
        device.run()
    watched.probe.flush()
    repeated = watched.read().column("step_repeated")
    assert [value == 1.0 for value in repeated] == [False] * 6 + [True]


def test_the_run_does_not_look_stalled(watch, device):
    watched, loop = watch(), Loop(device)
    stamps = []
    for _ in range(3):
        loop.graph.replay()
        state = watched.state()
        stamps.append((state.phase, state.started_sequence))
    assert stamps == [(Phase.FORWARD, sequence) for sequence in (4, 5, 6)]


def test_a_loss_that_is_not_finite_is_recorded_as_such(watch, device):
    watched, loop = watch(), Loop(device)
    for loss in (1.0, nan, 1.0):
        loop.graph.replay()
        watched.probe.observe(loss=torch.tensor(loss))
        device.run()
    watched.probe.flush()
    assert watched.read().column("loss_nonfinite")[3:] == [0.0, 1.0, 0.0]


def test_replays_and_ordinary_steps_may_alternate(watch, device):
    watched, loop = watch(), Loop(device)
    for _ in range(4):
        loop.graph.replay()
        loop.step()
        device.run()
    watched.probe.flush()
    contents = watched.read()
    measured = [not isnan(contents.gradients(i)["sum_squares"]) for i in range(11)]
    assert measured == [True] * 3 + [False, True] * 4


def test_a_replay_counts_on_whichever_thread_it_is(watch, device):
    watched, loop = watch(), Loop(device)

    def replay() -> None:
        for _ in range(5):
            loop.graph.replay()
        watched.probe.flush()

    thread = Thread(target=replay)
    thread.start()
    thread.join()
    assert len(watched.read().records) == 3 + 5


def test_a_graph_without_an_optimizers_step_is_no_step(watch, device):
    watched, loop = watch(), Loop(device)
    graph = Graph()
    graph.capture_begin()
    graph.capture_end()
    for number in range(5):
        graph.replay()
        watched.probe.observe(step=number)
        loop.step()
        device.run()
    watched.probe.flush()
    assert len(watched.read().records) == 8


def test_of_a_graph_captured_before_the_observed_step_number_ends_a_step(watch, device):
    watched, loop = watch(), Loop(device)
    graph = Graph()
    for number in range(4, 14):
        graph.replay()
        watched.probe.observe(loss=float(number), step=number)
    del loop
    watched.probe.flush()
    contents = watched.read()
    assert len(contents.records) == 3 + 9, "the number describes the step before it"


def test_a_number_that_is_observed_without_a_replay_ends_nothing(watch, device):
    watched, loop = watch(), Loop(device)
    for number in range(4, 14):
        watched.probe.observe(step=number)
    del loop
    watched.probe.flush()
    assert len(watched.read().records) == 3


def test_the_hooks_are_removed_again(watch):
    before = dict(vars(Graph))
    watched = watch()
    assert vars(Graph)["replay"] is not before["replay"]
    watched.close()
    assert vars(Graph)["replay"] is before["replay"]
