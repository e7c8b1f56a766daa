"""Odd objects in the process cost themselves at most: steps, loss and other gradients go on."""

import weakref
from collections.abc import Callable, Iterator
from math import isfinite, isnan
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mp_agent

STEPS = 15


class Answering(nn.Module):
    """Has every attribute that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return lambda *_, **__: self

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        raise RuntimeError("no modules")


class UnhashableClass(type):
    __hash__ = None  # type: ignore[assignment]

    def mro(cls) -> list[type]:
        return super().mro()


class Unhashable(metaclass=UnhashableClass):
    __slots__ = ()


class Lying:
    """Says that it is a module, and raises whatever it is asked."""

    @property  # type: ignore[misc] # it shall not be what it says
    def __class__(self) -> type:
        raise RuntimeError("no class")

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


class RaisingFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if _is_called_by_the_probe():
            raise RuntimeError("not in my mode")
        return function(*args, **(kwargs or {}))


class CountingOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class RaisingParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if _is_called_by_the_probe():
            raise RuntimeError("not my way")
        return super().__torch_function__(function, types, args, kwargs or {})


class Partial(nn.Module):
    """A model of which one part is never used."""

    def __init__(self, unused: nn.Module) -> None:
        super().__init__()
        self.unused = unused
        self.used = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.table(torch.arange(4))
        return outputs


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.complex64) @ self.weight).abs()


def with_odd_weight(kind: Callable[[torch.Tensor], nn.Parameter]) -> nn.Module:
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.Linear(4, 2))
    first.weight = kind(first.weight.detach().clone())
    return model


def train(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Train a model; return its losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(watched, losses: list[float]) -> None:
    contents = watched.read()
    assert contents.column("loss") == pytest.approx(losses, rel=1e-6)
    assert all(isfinite(contents.gradients(row)["sum_squares"]) for row in range(len(losses)))
    assert contents.state.probe_errors == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Partial(nn.LazyLinear(4)),
        lambda: Partial(nn.Linear(3, 2, device="meta")),
        lambda: Partial(Answering()),
        lambda: with_odd_weight(RaisingParameter),
        Sparse,
        Complex,
    ],
    ids=["lazy", "meta", "answering", "raising", "sparse", "complex"],
)
def test_odd_parameters_and_modules_cost_themselves_at_most(watch, make):
    torch.manual_seed(1)
    model = make()
    watched = watch()
    check(watched, train(model))


class Sealed(torch.Tensor):
    """A gradient that only its own optimizer can read, such as a quantised one."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> "Sealed":
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod  # torch calls it so, and types it as a static method
    def __torch_dispatch__(  # type: ignore[override]
        cls, function, types, args=(), kwargs=None
    ):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"no {function}")


class Skipping(torch.optim.SGD):
    """Steps with the gradients that it can read."""

    def step(self, closure=None):
        held = [each for group in self.param_groups for each in group["params"]]
        kept = {each: each.grad for each in held if type(each.grad) is Sealed}
        for each in kept:
            each.grad = None
        super().step(closure)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 1000], ids=["layers", "totals"])
def test_a_gradient_that_cannot_be_measured_costs_itself_alone(watch, interval):
    torch.manual_seed(1)
    first = nn.Linear(3, 4)
    model, weight = nn.Sequential(first, nn.Linear(4, 2)), first.weight
    optimizer = Skipping(model.parameters(), lr=0.01)
    watched = watch(layer_interval=interval)
    losses, squares = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        assert weight.grad is not None
        weight.grad = Sealed(weight.grad)
        losses.append(loss.item())
        rest = [each.grad for each in model.parameters() if each is not weight]
        squares.append(sum(float(g.square().sum().item()) for g in rest if g is not None))
        optimizer.step()
    check(watched, losses)
    contents = watched.read()
    shown = [contents.gradients(row)["sum_squares"] for row in range(STEPS)]
    assert shown == pytest.approx(squares, rel=1e-5)
    assert contents.state.unsupported == ("gradients of type Sealed float32",)


def test_odd_live_objects_are_passed_by(watch):
    alive = [Unhashable(), Lying(), Answering(), nn.Linear.__new__(nn.Linear)]
    watched = watch()
    check(watched, train(nn.Linear(3, 2)))
    assert len(alive) == 4


def test_a_lazy_parameter_is_measured_once_it_has_numbers(watch):
    watched = watch()
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert len(watched.read().schema.layers) == 4


def test_modes_of_the_script_neither_fail_nor_see_the_probe(watch):
    model = nn.Linear(3, 2)
    with CountingOperations() as alone:
        train(model)
    watched = watch()
    with CountingOperations() as together, RaisingFunctions():
        losses = train(model)
    assert together.count == alone.count
    check(watched, losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "switch",
    [
        lambda on: torch.use_deterministic_algorithms(on),
        lambda on: torch.set_default_dtype(torch.float64 if on else torch.float32),
        lambda on: torch.set_default_device("meta" if on else None),
        lambda on: torch.autograd.set_detect_anomaly(on),
    ],
    ids=["deterministic", "dtype", "device", "anomaly"],
)
def test_switches_of_torch_change_nothing(watch, switch):
    model, inputs = nn.Linear(3, 2), torch.ones(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = watch()
    switch(True)
    try:
        losses = []
        for _ in range(STEPS):
            loss = model(inputs.to(model.weight.dtype)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    finally:
        switch(False)
    check(watched, losses)


def test_parameters_without_elements_are_passed_by(watch):
    empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = torch.optim.SGD([empty], lr=0.1)
    watched = watch()
    for _ in range(STEPS):
        optimizer.zero_grad()
        empty.sum().backward()
        optimizer.step()
    contents = watched.read()
    assert (len(contents.records), contents.state.probe_errors) == (STEPS, 0)


@pytest.fixture
def swapping() -> Iterator[None]:
    """Have `module.to()` swap tensors, as it does of itself with DTensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("settings", [{}, {"measure_updates": True, "layer_interval": 2}])
def test_parameters_and_gradients_can_be_swapped_between_steps(watch, swapping, settings):
    model = Partial(nn.Linear(3, 2))
    mp_agent.declare(model.used.bias)
    optimizer = torch.optim.AdamW(model.used.parameters(), lr=0.01)
    watched = watch(**settings)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean() + model.unused(torch.ones(3)).sum()
        loss.backward()
        losses.append(loss.item())
        del loss
        if step % 2:
            model.double().float()
        optimizer.step()
        model.double().float()
    check(watched, losses)


def test_what_others_refer_to_is_swapped_no_more_than_before(watch):
    watch()
    tensors = torch.ones(2), torch.zeros(2)
    reference = weakref.ref(tensors[0])
    with pytest.raises(RuntimeError, match="Cannot swap t1"):
        torch.utils.swap_tensors(*tensors)
    assert reference() is tensors[0]


def test_an_optimizer_that_cannot_be_read_costs_its_own_steps(watch):
    class Odd(torch.optim.SGD):
        @property  # type: ignore[override] # what SGD has as a plain attribute
        def param_groups(self) -> object:
            if _is_called_by_the_probe():
                raise RuntimeError("not for you")
            return self._groups

        @param_groups.setter
        def param_groups(self, groups: object) -> None:
            self._groups = groups

    watched = watch()
    odd = nn.Linear(3, 2)
    optimizer = Odd(odd.parameters(), lr=0.1)
    for _ in range(30):
        odd(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    model = nn.Linear(3, 2)
    train(model, 20)
    contents = watched.read()
    assert len(contents.records) == 20
    assert not any(map(isnan, contents.column("loss")[1:]))


@pytest.mark.slow
def test_a_sweep_of_trainings_reads_like_one_and_walks_the_objects_a_few_times(watch, monkeypatch):
    from mp_agent.probe.optimizers import live_objects

    walks: list[bool] = []
    walk = live_objects.walk

    def counted(*, young: bool = False) -> live_objects.LiveObjects:
        walks.append(young)
        return walk(young=young)

    monkeypatch.setattr(live_objects, "walk", counted)
    watched = watch()
    for _ in range(60):
        train(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for _ in range(60):
        train(model, 3)
    contents = watched.read()
    assert len(contents.records) == 360
    assert {layer.name for layer in contents.schema.layers} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }
    assert walks.count(False) < 20


def _is_called_by_the_probe() -> bool:
    import sys

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("probe/isolation.py"):
            return True
        frame = frame.f_back
    return False
