"""A comparison leaves the model and the process exactly as they were, also when it fails."""

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mp_agent.errors import CompareError
from mp_agent.plan.comparison.api import compare
from tests.agent.plan.comparison.planted import batch, chain
from tests.subtests import each

DTYPES = ["fp16-autocast", "bf16", "fp8-e4m3"]


class Failing(nn.Module):
    """Raises for one dtype of its input."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        if x.dtype is self.dtype:
            raise ArithmeticError("planted")
        return x


def model_with_everything(planted=None):
    model: Any = chain(planted or nn.Identity())
    model.middle = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2))
    model.first.eval()
    model.first.weight.requires_grad_(False)
    model.last.weight.grad = torch.ones_like(model.last.weight)
    return model


def state_of(model):
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "objects": [id(one) for one in (*model.parameters(), *model.buffers())],
        "grads": [
            None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()
        ],
        "needed": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "forwards": ["forward" in module.__dict__ for module in model.modules()],
        "versions": [one._version for one in (*model.parameters(), *model.buffers())],
        "random": (
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"],
        ),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "threads": threading.enumerate(),
    }


def assert_same(before, after):
    # Those of other tests may end meanwhile.
    assert set(after["threads"]) <= set(before["threads"])
    for key in before.keys() - {"threads"}:
        assert _equal(before[key], after[key]), key


def _equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", ["plain", "autocast", "no_grad", "inference"])
def test_a_comparison_changes_nothing(surroundings):
    model = model_with_everything()
    contexts: dict[str, Any] = {
        "plain": torch.enable_grad(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
    }
    with contexts[surroundings]:
        before = state_of(model)
        report = compare(model, batch(), nn.CrossEntropyLoss(), dtypes=DTYPES, search_trials=3)
        assert_same(before, state_of(model))
    assert all(one.parameters and not one.failure for one in report.candidates)


def test_a_candidate_that_fails_is_reported_and_changes_nothing():
    model = model_with_everything(Failing(torch.float16))
    before = state_of(model)
    report = compare(model, batch(), nn.CrossEntropyLoss(), dtypes=["fp16", "bf16"])
    assert_same(before, state_of(model))
    failed, fine = report.candidates
    assert failed.failure == "ArithmeticError: planted" and not failed.verdict.passed
    assert fine.failure == ""


def test_a_reference_that_fails_raises_and_changes_nothing():
    model = model_with_everything(Failing(torch.float32))
    before = state_of(model)
    with pytest.raises(ArithmeticError, match="planted"):
        compare(model, batch(), nn.CrossEntropyLoss(), dtypes=["bf16"])
    assert_same(before, state_of(model))


def test_an_interrupt_ends_the_comparison_and_changes_nothing():
    model = model_with_everything()
    before = state_of(model)

    def interrupt(candidate, stage, count):
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(model, batch(), nn.CrossEntropyLoss(), dtypes=["bf16"], progress=interrupt)
    assert_same(before, state_of(model))


def test_two_comparisons_give_the_same_numbers():
    reports = [
        compare(
            model_with_everything(),
            batch(),
            nn.CrossEntropyLoss(),
            dtypes=["bf16"],
            search_trials=0,
        )
        for _ in range(2)
        if torch.manual_seed(4)
    ]
    assert reports[0].as_json() == reports[1].as_json()


@each(
    ("arguments", "message"),
    [
        ({"model": "x"}, "model: str is not a torch.nn.Module"),
        ({"loss": 3}, "loss: 3 is neither"),
        (
            {"loss": lambda model, batch: model(batch[0])},
            r"loss: is torch.float32 of shape \(16, 4\) and not one",
        ),
        ({"batch": torch.ones(3)}, "batch: Tensor is no pair"),
        ({"tolerance": 0.0}, "tolerance: 0.0 is not a positive"),
        ({"loss_scale": float("nan")}, "loss_scale: nan is not a positive"),
        ({"search_trials": -1}, "search_trials: -1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    given: dict[str, Any] = {
        "model": chain(nn.Identity()),
        "batch": batch(),
        "loss": nn.CrossEntropyLoss(),
    }
    given |= arguments
    model, data, loss = given.pop("model"), given.pop("batch"), given.pop("loss")
    with pytest.raises(CompareError, match=message):
        compare(model, data, loss, dtypes=["bf16"], **given)
