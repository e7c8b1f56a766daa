"""torch.compile sees nothing of the probe, and the probe sees the training all the same."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

dynamo = pytest.importorskip("torch._dynamo")
testing = pytest.importorskip("torch._dynamo.testing")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(inputs).pow(2).mean()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def graph_breaks() -> int:
    return sum(dynamo.utils.counters["graph_break"].values())


def train(model: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("attach_first", [True, False])
def test_a_compiled_model_is_one_graph_without_warnings(watch, attach_first):
    watched = watch() if attach_first else None
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    graphs = testing.CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    if not attach_first:
        compiled(torch.ones(2, 4))
        watched = watch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(compiled, optimizer)
    assert graph_breaks() == 0
    assert graphs.frame_count == 1
    contents = watched.read()
    assert len(contents.records) == 3
    assert [layer.name for layer in contents.schema.layers] == ["layer.weight", "layer.bias"]


def clip_by_norm(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_by_value(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def scale(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(model(torch.ones(2, 4)))


def backward(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    model(torch.ones(2, 4)).backward()


@pytest.mark.parametrize("part", [clip_by_norm, clip_by_value, scale, backward])
def test_a_part_of_the_loop_compiles_as_it_does_without_the_probe(watch, part):
    def count() -> tuple[int, int]:
        dynamo.reset()
        dynamo.utils.counters.clear()
        model, scaler = Model(), torch.amp.GradScaler("cpu")
        model(torch.ones(2, 4)).backward()
        scaler.scale(torch.ones(()))
        graphs = testing.CompileCounter()
        torch.compile(part, backend=graphs)(model, scaler)
        return graphs.frame_count, graph_breaks()

    without = count()
    watched = watch()
    assert count() == without
    del watched


def test_a_compiled_optimizer_step_is_still_seen(watch):
    watched = watch()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        model(torch.ones(2, 4)).backward()
        step()
        optimizer.zero_grad()
    assert len(watched.read().records) == 3


@pytest.mark.parametrize("attach_first", [True, False])
def test_an_optimizers_own_step_compiled_is_still_seen(watch, attach_first):
    watched = watch() if attach_first else None
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    if not attach_first:
        model(torch.ones(2, 4)).backward()
        step()
        watched = watch()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).backward()
        squares = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters())
        step()
    contents = watched.read()
    assert len(contents.records) == 3
    assert contents.gradients(2)["sum_squares"] == pytest.approx(squares, rel=1e-6)
    assert contents.state.probe_errors == 0
