"""How a verdict is carried out, on the host and as on a device."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.guard.update import GuardedUpdate
from mp_agent.probe.guard.verdict import UpdateVerdict
from tests.agent.probe.small_model import make_loss, make_model
from tests.subtests import each

Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def _verdict(*, skipped: bool = False, coefficient: float = 1.0) -> UpdateVerdict:
    no, number = torch.tensor(False), torch.tensor(1.0, dtype=torch.float64)
    return UpdateVerdict(
        norm=number,
        limit=number,
        is_nonfinite=no,
        is_scaler_skip=no,
        is_spike=no,
        is_skipped=torch.tensor(skipped),
        coefficient=number * coefficient,
        is_none_left=no,
        is_last_skip=no,
        is_failed=no,
        is_rate_held=no,
    )


def _trained(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step, with new gradients."""
    model = make_model()
    optimizer = make(model.parameters())
    for seed in range(2):
        optimizer.zero_grad()
        make_loss(model, seed).backward()
        if seed == 0:
            optimizer.step()
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return deepcopy((model.state_dict(), optimizer.state_dict()))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


class _Unaware(torch.optim.Optimizer):
    """Looks for no absent gradients, and keeps state of several kinds, as one by hand may do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state.setdefault("past", []).append(float(parameter.grad.sum()))
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.mul_(0.99).add_(momentum, alpha=-group["lr"])


@pytest.mark.parametrize("steps", [0, 1])
def test_a_skipped_update_of_an_optimizer_that_is_not_torchs_is_undone(steps):
    model = make_model()
    optimizer = _Unaware(model.parameters())
    for seed in range(steps + 1):
        make_loss(model, seed).backward()
        if seed < steps:
            optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    momenta = [state["momentum"] for state in optimizer.state.values()]
    before = _state(model, optimizer)

    update = GuardedUpdate(optimizer, _verdict(skipped=True))
    optimizer.step()
    assert not _equal(_state(model, optimizer), before)
    update.finish()

    assert _equal(_state(model, optimizer), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    kept = [state["momentum"] for state in optimizer.state.values()]
    assert all(now is then for now, then in zip(kept, momenta, strict=True))


def test_the_state_of_an_optimizer_within_one_that_is_not_torchs_is_put_back(watch):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            self.inner.step()

    model, inner = _trained(OPTIMIZERS["adamw"])
    outer = Wrapper(inner)
    before = _state(model, inner)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = torch.nan
    watch(guard=True)
    outer.step()
    assert _equal(_state(model, inner), before)


class _OnePerParameter(torch.optim.Optimizer):
    """Updates by optimizers that it keeps in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.1})
        self.inner = [OPTIMIZERS["sgd"]([p]) for p in self.param_groups[0]["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for own in self.inner:
            own.step()


class _WithMasters(torch.optim.Optimizer):
    """Updates copies of the parameters, which get their gradients in the step alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.1})
        self.pairs = [(p, p.detach().clone()) for p in self.param_groups[0]["params"]]
        self.inner = OPTIMIZERS["sgd"]([master for _, master in self.pairs])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.clone()
        self.inner.step()
        self.inner.zero_grad()
        for parameter, master in self.pairs:
            parameter.copy_(master)


@pytest.mark.parametrize("make", [_OnePerParameter, _WithMasters])
def test_after_a_skipped_update_what_an_optimizer_holds_goes_on_as_without_the_batch(make, watch):
    watch(guard="skip_nonfinite")
    weights = []
    for seeds in ((0, 1, 2, 3), (0, 1, 3)):
        model = make_model()
        optimizer = make(model.parameters())
        for seed in seeds:
            (make_loss(model, seed) * (torch.nan if seed == 2 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.state_dict())
    assert _equal(*weights)


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Carry verdicts out as on the host, or without reading them as on a device."""
    if request.param == "device":
        on_device = GuardedUpdate._carry_out_on_device
        monkeypatch.setattr(GuardedUpdate, "_carry_out_on_host", on_device)
    return str(request.param)


@each("name", OPTIMIZERS)
def test_a_skipped_update_changes_neither_weights_nor_state_on_the_host(name):
    model, optimizer = _trained(OPTIMIZERS[name])
    gradients = [parameter.grad for parameter in model.parameters()]
    before = _state(model, optimizer)

    update = GuardedUpdate(optimizer, _verdict(skipped=True))
    optimizer.step()
    update.finish()

    assert _equal(_state(model, optimizer), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_a_fused_optimizer_skips_without_the_verdict_being_read(place):
    model, optimizer = _trained(OPTIMIZERS["fused"])
    before = _state(model, optimizer)
    update = GuardedUpdate(optimizer, _verdict(skipped=True))
    optimizer.step()
    update.finish()
    assert _equal(_state(model, optimizer), before)
    assert not hasattr(optimizer, "found_inf")


def test_gradients_that_are_not_finite_reach_no_other_optimizer_on_a_device(monkeypatch):
    monkeypatch.setattr(GuardedUpdate, "_carry_out_on_host", GuardedUpdate._carry_out_on_device)
    model, optimizer = _trained(OPTIMIZERS["adamw"])
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = torch.nan
    update = GuardedUpdate(optimizer, _verdict(skipped=True))
    optimizer.step()
    update.finish()
    tensors = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_ordinary_update_is_the_same_to_the_bit(place, name):
    model, optimizer = _trained(OPTIMIZERS[name])
    twin, twins = _trained(OPTIMIZERS[name])
    update = GuardedUpdate(optimizer, _verdict())
    optimizer.step()
    update.finish()
    twins.step()
    assert _equal(_state(model, optimizer), _state(twin, twins))


def test_gradients_are_multiplied_by_the_coefficient(place):
    model, optimizer = _trained(OPTIMIZERS["sgd"])
    expected = [p.grad * 0.25 for p in model.parameters() if p.grad is not None]
    GuardedUpdate(optimizer, _verdict(coefficient=0.25)).finish()
    gradients = [p.grad for p in model.parameters()]
    assert _equal(gradients, expected)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_the_learning_rate_is_lower_during_the_update_alone(place, rate):
    used = []
    model, _ = _trained(OPTIMIZERS["sgd"])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer.register_step_pre_hook(lambda o, *_: used.append(float(o.param_groups[0]["lr"])))
    update = GuardedUpdate(optimizer, _verdict(), rate_factor=0.5)
    optimizer.step()
    update.finish()
    assert used == [pytest.approx(0.05)]
    assert optimizer.param_groups[0]["lr"] is rate


def test_a_rate_that_the_script_sets_during_the_update_stays():
    _, optimizer = _trained(OPTIMIZERS["sgd"])
    update = GuardedUpdate(optimizer, _verdict(), rate_factor=0.5)
    optimizer.param_groups[0]["lr"] = 0.7
    update.finish()
    assert optimizer.param_groups[0]["lr"] == 0.7
