"""The guard of one process, around loops as people write them."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from threading import Thread

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from mp_agent.records.columns import step_columns
from tests.agent.probe.small_model import fail, make_loss, make_model

POISONED, SPIKING, STEPS = 25, 28, 35


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    with_closure: bool = False,
    steps: int = STEPS,
) -> list[dict[str, torch.Tensor]]:
    """Train; return the weights after each step. Gradients are bad on two of them."""
    weights = []
    for step in range(steps):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = make_loss(model, step)
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if step == POISONED:
                    parameter.grad.view(-1)[0] = torch.nan
                if step == SPIKING:
                    parameter.grad.mul_(1e4)
            return float(loss.detach())

        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        weights.append(deepcopy(model.state_dict()))
    return weights


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _columns(watch, name: str) -> list[float]:
    """A step column of every step in the ring, in order."""
    contents = watch.read()
    position = contents.schema.step_columns.index(name)
    return [float(record.values[position]) for record in contents.records]


@pytest.mark.parametrize("with_closure", [False, True])
def test_skips_what_is_not_finite_and_clips_a_spike(watch, with_closure):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    started = watch(guard=True)

    weights = _train(model, optimizer, with_closure=with_closure)

    assert _equal(weights[POISONED], weights[POISONED - 1])
    moved = [
        sum(float((w[name] - b[name]).pow(2).sum()) for name in w) ** 0.5
        for b, w in pairwise(weights)
    ]
    assert moved[SPIKING - 1] <= 2.0 * max(moved[: POISONED - 1])
    assert torch.isfinite(weights[-1]["0.weight"]).all()
    started.probe.flush()
    skips = _columns(started, "guard_skip_update")
    clips = _columns(started, "guard_clip_gradients")
    assert [step for step, value in enumerate(skips) if value == 1.0] == [POISONED]
    assert [step for step, value in enumerate(clips) if value == 1.0] == [SPIKING]


def test_a_dry_run_trains_as_without_a_guard_and_counts(watch):
    plain = _train(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.01))
    started = watch(guard=True, guard_dry_run=True)
    dry = _train(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.01))
    assert all(_equal(a, b) for a, b in zip(plain[:POISONED], dry[:POISONED], strict=True))
    assert torch.isnan(dry[-1]["0.weight"]).any()
    assert torch.isnan(plain[-1]["0.weight"]).any()
    started.probe.flush()
    assert _columns(started, "guard_skip_update")[POISONED] == 0.5


def test_a_healthy_run_is_the_same_to_the_bit(watch):
    plain = _train(model := make_model(), torch.optim.AdamW(model.parameters()), steps=24)
    watch(guard=True)
    guarded = _train(model := make_model(), torch.optim.AdamW(model.parameters()), steps=24)
    assert all(_equal(a, b) for a, b in zip(plain, guarded, strict=True))


def test_without_policies_nothing_is_hooked_and_nothing_recorded(watch):
    started = watch()
    _train(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.01), steps=2)
    started.probe.flush()
    assert started.probe.requests is None
    columns = started.read().schema.step_columns
    assert columns == step_columns(guarded=False)
    assert not [name for name in columns if name.startswith("guard_")]


def test_what_a_policy_does_not_do_is_recorded_as_0_and_other_actions_are_absent(watch):
    started = watch(guard={"skip_nonfinite": {}, "request_stop": {}})
    _train(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.01), steps=3)
    started.probe.flush()
    for name in ("guard_skip_update", "guard_request_stop", "guard_none_left"):
        assert _columns(started, name) == [0.0] * 3
    assert all(value != value for value in _columns(started, "guard_clip_gradients"))


def test_a_stop_is_asked_for_before_the_first_update_that_could_not_be_skipped(watch):
    started = watch(guard={"skip_nonfinite": {"actions_max": 3}, "request_stop": {}})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    requests = started.probe.requests
    assert requests is not None
    steps = 0
    while not requests.stop and steps < 10:
        optimizer.zero_grad()
        (make_loss(model, steps) * float("nan")).backward()
        optimizer.step()
        steps += 1
    assert steps == 3
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_of_several_optimizers_of_a_step_one_action_is_enough(watch):
    started = watch(guard=True)
    model = make_model()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    first, second = (torch.optim.SGD(half, lr=0.01) for half in halves)
    make_loss(model, 0).backward()
    first_gradient = halves[0][0].grad
    assert first_gradient is not None
    first_gradient.view(-1)[0] = torch.nan
    first.step()
    second.step()
    started.probe.flush()
    assert _columns(started, "guard_skip_update") == [1.0]


def test_detaching_restores_what_is_switched(watch):
    started = watch(guard={"widen_precision": {"troubles": 1}})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _train(model, optimizer, steps=POISONED + 1)
    assert type(model) is not nn.Sequential
    started.probe.detach()
    assert type(model) is nn.Sequential


def test_a_failure_to_measure_turns_the_guard_off_and_training_goes_on(watch, monkeypatch, caplog):
    started = watch(guard=True)
    monkeypatch.setattr("mp_agent.probe.guard.verdict.GradientReader.read", fail)
    weights = _train(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.01), steps=3)
    assert not _equal(weights[1], weights[2])
    assert "the guard is off from now on" in caplog.text
    started.probe.flush()


def test_a_failure_to_act_turns_the_guard_off_and_restores_what_is_switched(
    watch, monkeypatch, caplog
):
    """Not to rest alone after some failures: the other ranks would wait for this one."""
    started = watch(guard={"skip_nonfinite": {}, "widen_precision": {"troubles": 1}})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _train(model, optimizer, steps=POISONED + 1)
    assert type(model) is not nn.Sequential
    monkeypatch.setattr("mp_agent.probe.guard.update.GuardedUpdate", fail)
    _train(model, optimizer, steps=2)
    assert "the guard is off from now on" in caplog.text
    assert type(model) is nn.Sequential
    assert started.state().probe_errors == 1


def test_steps_that_fill_in_state_for_a_checkpoint_are_no_updates(watch, monkeypatch):
    """One rank alone may make them: it would wait for the others."""
    watch(guard=True)
    monkeypatch.setattr("mp_agent.probe.guard.outcome.Agreement.sums", fail)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state


def test_a_new_thread_that_trains_after_the_first_has_ended_is_guarded(watch):
    watch(guard=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for steps in (3, POISONED + 1):
        thread = Thread(target=_train, args=(model, optimizer), kwargs={"steps": steps})
        thread.start()
        thread.join()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_second_thread_that_trains_meanwhile_is_not_guarded_which_is_said(watch, caplog):
    watch(guard=True)
    model = make_model()
    _train(model, torch.optim.SGD(model.parameters(), lr=0.01), steps=3)
    other = make_model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    thread = Thread(target=_train, args=(other, optimizer), kwargs={"steps": POISONED + 1})
    thread.start()
    thread.join()
    assert not all(torch.isfinite(parameter).all() for parameter in other.parameters())
    assert caplog.text.count("the guard of updates by more than one thread") == 1


def test_an_optimizer_within_an_optimizer_is_decided_on_once(watch):
    class Outer(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            inner.step()

    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    started = watch(guard={"request_checkpoint": {"troubles": 1}})
    outer = Outer(model.parameters(), lr=0.01)
    _train(model, outer, steps=POISONED + 1)
    assert started.probe.requests is not None
    assert started.probe.requests.take_checkpoint()
    assert not started.probe.requests.take_checkpoint()


def test_the_loss_scale_is_kept_above_its_floor(watch):
    watch(guard={"raise_loss_scale": {"floor": 64.0}})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(make_loss(model, step) * (float("inf") if step < 5 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [128.0, 64.0, 64.0, 64.0, 64.0, 64.0]


def test_skips_of_a_scaler_are_trouble_for_the_slower_policies(watch):
    started = watch(guard={"request_stop": {"troubles": 2, "trouble_steps": 10}})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    requested = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(make_loss(model, step) * (float("inf") if step in (1, 2) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert started.probe.requests is not None
        requested.append(started.probe.requests.stop)
    assert requested == [False, False, True, True]


def _scales(model: nn.Module, overflows: range, steps: int) -> list[float]:
    """Train with a GradScaler; return its scale after each update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        factor = float("inf") if step in overflows else 1.0
        scaler.scale(make_loss(model, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


_AFTER_COLLAPSE = {"reset_loss_scale": {"calm_steps": 5}}


def test_the_loss_scale_is_set_back_after_a_collapse_and_that_is_recorded_and_logged(watch, caplog):
    started = watch(guard=_AFTER_COLLAPSE)
    scales = _scales(make_model(), range(5, 15), 24)
    assert scales[14:21] == [2.0**6] * 5 + [2.0**16] * 2
    started.probe.flush()
    column = _columns(started, "guard_reset_loss_scale")
    assert {step: value for step, value in enumerate(column) if value} == {
        20: 1.0
    }  # the first with it
    assert "step 21: the loss scale is set to 65536, from 64" in caplog.text


def test_a_dry_run_leaves_the_loss_scale_and_counts_the_reset_once(watch, caplog):
    plain = _scales(make_model(), range(5, 15), 40)
    started = watch(guard=_AFTER_COLLAPSE, guard_dry_run=True)
    assert _scales(make_model(), range(5, 15), 40) == plain
    started.probe.flush()
    column = _columns(started, "guard_reset_loss_scale")
    assert {step: value for step, value in enumerate(column) if value} == {20: 0.5}
    assert "guard (dry run), step 21" in caplog.text


def test_after_a_floor_the_scale_is_set_back_to_what_held_before(watch):
    watch(guard={"raise_loss_scale": {"floor": 2.0**10}, **_AFTER_COLLAPSE})
    scales = _scales(make_model(), range(5, 15), 24)
    assert set(scales[10:19]) == {2.0**10}
    assert scales[-1] == 2.0**16


def test_a_healthy_run_under_a_scaler_is_the_same_with_the_policy(watch):
    plain = _scales(make_model(), range(0), 24)
    started = watch(guard=_AFTER_COLLAPSE)
    assert _scales(make_model(), range(0), 24) == plain
    started.probe.flush()
    assert _columns(started, "guard_reset_loss_scale") == [0.0] * 24
