"""What the script finds between updates, and where it cuts one short: its own learning rates."""

import copy
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mp_agent
from mp_agent.probe import api
from mp_agent.probe.guard.training_guard import TrainingGuard
from mp_agent.probe.guard.update import GuardedUpdate
from tests.agent.probe.small_model import make_loss, make_model

POISONED, STEPS = 2, 8
POLICIES: dict[str, dict[str, float]] = {
    "skip_nonfinite": {},
    "lower_learning_rate": {"troubles": 1, "hold_steps": 4},
    "request_checkpoint": {"troubles": 1},
}


def _poison(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = torch.nan


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        make_loss(model, step).backward()
        if step == POISONED:
            _poison(model)
        optimizer.step()


@pytest.fixture
def init(tmp_path, monkeypatch):
    """`mp_agent.init` with the policies, as a script calls it."""
    monkeypatch.setattr(api, "_checkpoint_callbacks", [])
    yield lambda: mp_agent.init(dir=tmp_path, run="run", node_agent="none", guard=POLICIES)
    mp_agent.shutdown()


def test_a_checkpoint_saved_by_a_callback_has_the_rates_and_gradients_of_the_script(init):
    init()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[tuple[float, bool]] = []

    @mp_agent.on_checkpoint_request
    def save(step: int) -> None:
        rate = optimizer.state_dict()["param_groups"][0]["lr"]
        found.append((rate, all(p.grad is not None for p in model.parameters())))

    _train(model, optimizer)
    assert found == [(0.1, True)]


def test_a_callback_may_end_the_watching(init):
    init()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mp_agent.on_checkpoint_request(lambda step: mp_agent.shutdown())
    _train(model, optimizer)
    assert not mp_agent.checkpoint_requested()
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("hooks", ["before", "after"])
def test_a_scheduler_in_a_hook_of_the_optimizer_steps_from_the_rates_of_the_script(watch, hooks):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if hooks == "before":
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    watch(guard=POLICIES)
    if hooks == "after":
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    _train(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**STEPS


def test_no_hook_stays_on_the_optimizer_once_the_guard_has_ended(watch):
    started = watch(guard=POLICIES)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer)
    started.probe.detach()
    assert not optimizer._optimizer_step_post_hooks


class _BreaksOff(torch.optim.SGD):
    """Runs what is given in the middle of its step, where its rate is in use."""

    within: Callable[["_BreaksOff"], None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.within(self)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def _lowered(model: nn.Module) -> _BreaksOff:
    """Return an optimizer of which the next step uses a lowered rate."""
    optimizer = _BreaksOff(model.parameters(), lr=0.1)
    optimizer.within = lambda _: None
    _train(model, optimizer)
    make_loss(model, STEPS).backward()
    return optimizer


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("place", ["step", "hook before", "hook after"])
def test_a_step_that_raises_leaves_the_rates_of_the_script(watch, error, place):
    watch(guard=POLICIES)
    optimizer = _lowered(make_model())
    used: list[float] = []

    def break_off(*_: object) -> None:
        used.append(optimizer.param_groups[0]["lr"])
        raise error

    if place == "step":
        optimizer.within = break_off
    elif place == "hook before":
        optimizer.register_step_pre_hook(break_off)
    else:
        optimizer.register_step_post_hook(break_off)
    with pytest.raises(error):
        optimizer.step()
    assert (used[0] < 0.1) == (place == "step")
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("owner", "name"),
    [(TrainingGuard, "update_ended"), (GuardedUpdate, "_carry_out_on_host")],
    ids=["restored", "lowered"],
)
def test_a_signal_handler_that_raises_while_rates_change_leaves_those_of_the_script(
    watch, monkeypatch, owner, name
):
    watch(guard=POLICIES)
    optimizer = _lowered(make_model())
    original = getattr(owner, name)
    struck: list[str] = []

    def strike(self: object, *arguments: Any) -> Any:
        if not struck:
            struck.append(name)
            signal.raise_signal(signal.SIGUSR1)
        return original(self, *arguments)

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(owner, name, strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert struck
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_signal_handler_that_saves_within_a_step_saves_the_rates_of_the_script(watch):
    watch(guard=POLICIES)
    optimizer = _lowered(make_model())
    saved: list[float] = []

    def handler(number: int, frame: object) -> None:
        saved.append(optimizer.param_groups[0]["lr"])
        saved.append(optimizer.state_dict()["param_groups"][0]["lr"])
        saved.append(optimizer.__getstate__()["param_groups"][0]["lr"])

    optimizer.within = lambda _: signal.raise_signal(signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    in_use, *others = saved
    assert in_use < 0.1
    assert others == [0.1, 0.1]


class _SavedWhole(torch.optim.SGD):
    """Saves all that it holds, its hooks included."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_an_optimizer_that_is_saved_with_its_hooks_is_copied_and_the_copy_steps(watch, copied):
    watch(guard=True)
    model = make_model()
    optimizer = _SavedWhole(model.parameters(), lr=0.1)
    make_loss(model, 0).backward()
    optimizer.step()
    other = copied(optimizer)
    (parameter, *_) = other.param_groups[0]["params"]
    before, parameter.grad = parameter.detach().clone(), torch.ones_like(parameter)
    other.step()
    assert torch.allclose(parameter, before - 0.1)


class _OwnRates(torch.optim.Optimizer):
    """Finds a rate by itself where a group has none, as Adafactor does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-(group["lr"] or 0.01))


def test_a_group_without_a_rate_is_guarded_and_the_rates_of_others_come_back(watch):
    watch(guard=POLICIES)
    model = make_model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": None}]
    optimizer = _OwnRates(groups)
    _train(model, optimizer)
    assert all(torch.isfinite(parameter).all() for parameter in parameters)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, None]


def test_a_closure_that_raises_leaves_the_rates_of_the_script(watch):
    watch(guard=POLICIES)
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError
        optimizer.zero_grad()
        loss = make_loss(model)
        loss.backward()
        if calls == 1:
            _poison(model)
        return loss

    optimizer.step(closure)  # skipped: there is no second call
    with pytest.raises(ValueError):
        optimizer.step(closure)
    assert calls == 3
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_the_docs_say_is_not_guarded_is_not(watch):
    """Running statistics of a forward pass, and the rate that LBFGS has read before its closure."""
    watch(guard=POLICIES)
    normalization = nn.BatchNorm1d(4)
    model = nn.Sequential(normalization, make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((3, 4), torch.nan)).sum().backward()
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert normalization.running_mean is not None
    assert torch.isnan(normalization.running_mean).all()

    weight = nn.Parameter(torch.zeros(1))
    slow = torch.optim.LBFGS([weight], lr=0.5, max_iter=1)

    def closure() -> torch.Tensor:
        slow.zero_grad()
        loss = (0.1 * weight).sum()
        loss.backward()
        return loss

    slow.step(closure)
    assert weight.item() == pytest.approx(-0.05)
