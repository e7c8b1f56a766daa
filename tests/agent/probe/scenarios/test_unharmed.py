"""Training is the same with and without the probe, also when the probe itself is broken."""

import logging
import os
import subprocess
import sys
from math import isfinite
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mp_agent.probe import isolation
from mp_agent.probe.probe import Probe
from mp_agent.probe.recording import ring_schema
from mp_agent.probe.step.measurement import StepMeasurement
from mp_agent.probe.tracker.step_tracker import UNREADABLE
from mp_agent.records.steps import Phase
from mp_agent.settings import Settings

STEPS = 200


def train(steps: int = STEPS, *, fused: bool = False) -> list[torch.Tensor]:
    """Train with dropout, autocast, scaler, accumulation and clipping; return the weights."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=5)
    for _ in range(steps):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(5, 6)).pow(2).mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def identical(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_weights_after_200_steps_are_bit_identical(watch, fused):
    alone = train(fused=fused)
    watched = watch()
    together = train(fused=fused)
    assert identical(alone, together)
    contents = watched.read()
    assert len(contents.records) == STEPS
    assert 0 < sum(contents.column("skipped")) < STEPS
    assert contents.state.probe_errors == 0


@pytest.mark.slow
def test_what_keeps_failing_costs_itself_alone_and_is_said_once(watch, monkeypatch, caplog):
    alone = train(50)
    watched = watch()
    monkeypatch.setattr(StepMeasurement, "_measure", _raise)
    with caplog.at_level(logging.WARNING, "mp_agent"):
        together = train(50)
    assert identical(alone, together)
    messages = [record.message for record in caplog.records]
    assert [message for message in messages if "training goes on" in message] == [
        "the probe failed in measuring gradients; training goes on"
    ]
    contents = watched.read()
    assert contents.state.unsupported == ("measuring gradients, which keeps failing",)
    assert contents.state.probe_errors <= isolation.FAILURES_AT_MOST + 1
    assert len(contents.records) == 50
    assert all(map(isfinite, contents.column("loss")))


def test_a_ring_that_cannot_be_made_leaves_training_alone():
    alone = train(20)
    probe = Probe(lambda: None, Settings())
    probe.attach()
    try:
        assert identical(alone, train(20))
    finally:
        probe.detach()


def test_a_ring_that_cannot_be_made_with_an_error_leaves_training_alone():
    alone = train(20)
    probe = Probe(_raise, Settings())
    probe.attach()
    try:
        assert identical(alone, train(20))
    finally:
        probe.detach()


def test_a_schema_for_which_there_is_no_memory_leaves_training_alone(watch, monkeypatch, caplog):
    alone = train(20)
    watched = watch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", _no_space)
        with caplog.at_level(logging.WARNING, "mp_agent"):
            assert identical(alone, train(20))
    (said,) = (record for record in caplog.records if record.name == "mp_agent")
    assert " is full: " in said.message and "Make it at least" in said.message
    assert said.exc_info is None and "\n" not in said.message
    state = watched.state()
    assert (state.probe_errors, state.unsupported) == (0, ())
    assert state.records_dropped == 20


def test_steps_are_recorded_once_there_is_memory_again(watch, monkeypatch):
    watched = watch()
    monkeypatch.setattr(ring_schema, "RETRY_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", _no_space)
        train(3)
    train(5)
    contents = watched.read()
    assert contents.state.records_dropped == 3
    assert len(contents.records) == 5


def test_an_interrupt_reaches_training(watch, monkeypatch):
    watch()
    monkeypatch.setattr(StepMeasurement, "fill_in", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(1)


def test_what_is_no_number_costs_only_itself_and_is_named(watch):
    watched = watch()
    good = {"loss": 2.0, "step": 70, "lr": 0.5, "tokens": 3}
    bad = [
        "text",
        object(),
        torch.ones(2),
        torch.tensor(1j),
        10**400,
        torch.empty((), device="meta"),
    ]
    for name in good:
        for value in bad if name != "step" else bad[:4]:
            watched.probe.observe(**(good | {"tokens": 0} | {name: value}))
    watched.probe.observe(**good)
    train(1)
    contents = watched.read()
    (record,) = contents.records
    assert record.step == 70
    assert contents.values(0)["loss"] == 2.0 and contents.values(0)["tokens"] == 3.0
    assert contents.values(0)["learning_rate"] == 0.5
    assert contents.state.probe_errors == 0
    assert set(contents.state.unsupported) == {UNREADABLE.format(name) for name in good}


def test_a_wrong_step_number_leaves_what_is_reported_with_it(watch):
    watched = watch()
    watched.probe.observe(step="epoch 3", loss=2.0, lr=0.5, tokens=3)
    train(1)
    values = watched.read().values(0)
    assert (values["loss"], values["learning_rate"], values["tokens"]) == (2.0, 0.5, 3.0)


def test_detaching_puts_torch_back_as_it_was(watch):
    before = _hooked_places()
    watched = watch()
    assert all(new is not old for new, old in zip(_hooked_places(), before, strict=True))
    watched.probe.detach()
    assert all(new is old for new, old in zip(_hooked_places(), before, strict=True))
    registry = sys.modules["torch.optim.optimizer"]
    assert not registry._global_optimizer_pre_hooks
    assert not registry._global_optimizer_post_hooks


def test_detaching_leaves_what_others_hooked_on_top(watch):
    original = torch.autograd.backward
    watched = watch()
    watched.probe.connect()
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        watched.probe.detach()
        assert torch.autograd.backward is theirs
        train(1)
        assert watched.state().phase is Phase.STARTING
    finally:
        torch.autograd.backward = original


@pytest.mark.slow
def test_two_probes_at_once_both_see_everything(watch):
    first, second = watch(), watch()
    train(5)
    second.probe.detach()
    train(5)
    assert len(first.read().records) == 10
    assert len(second.read().records) == 5
    assert first.read().column("loss")[:5] == second.read().column("loss")


def test_an_earlier_scaler_whose_class_overrides_everything_is_seen_once(watch):
    class Scaler(torch.amp.GradScaler):
        def scale(self, outputs):
            return super().scale(outputs * 2.0)

        def unscale_(self, optimizer):
            super().unscale_(optimizer)

        def step(self, optimizer, *args, **kwargs):
            return super().step(optimizer, *args, **kwargs)

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = Scaler("cpu", init_scale=8.0)
    watched = watch()
    losses = []
    for _ in range(2):
        losses.append(model(torch.ones(1, 2)).sum())
        scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
    contents = watched.read()
    assert len(contents.records) == 2
    assert contents.schema.fact("scaler") == "Scaler"
    assert contents.values(0)["loss"] == losses[0].item()


@pytest.mark.slow
def test_attaching_before_any_import_of_torchs_parts_works():
    """In a fresh interpreter, where nothing was imported in an order that happens to help."""
    code = (
        "from mp_agent.probe.probe import Probe\n"
        "from mp_agent.settings import Settings\n"
        "probe = Probe(lambda: None, Settings()); probe.attach(); probe.detach()\n"
        "import threading; assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _hooked_places() -> list[object]:
    from torch.amp import autocast_mode
    from torch.nn.utils import clip_grad

    functions: tuple[Any, ...] = (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_)
    return [
        torch.autograd.backward,
        torch.amp.GradScaler.scale,
        torch.amp.GradScaler.unscale_,
        torch.amp.GradScaler.step,
        autocast_mode.autocast.__enter__,
        *(function.__closure__[0].cell_contents for function in functions),
    ]


def _raise(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _interrupt(*_: object, **options: object) -> None:
    raise KeyboardInterrupt
