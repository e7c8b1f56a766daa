"""Gradients are compared with finite differences: planted errors are named, healthy models pass."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mp_agent.cli import main
from mp_agent.errors import CompareError
from mp_agent.plan.gradient_check import check_gradients

FEATURES, CLASSES, ROWS = 6, 3, 8
Made = tuple[nn.Module, Any, Any]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def classified(model: nn.Module, features: int = FEATURES) -> Made:
    return model, (torch.randn(ROWS, features), torch.arange(ROWS) % CLASSES), nn.CrossEntropyLoss()


class Block(nn.Module):
    """A residual block whose branch is changed by what a test plants."""

    def __init__(self, branch: Callable[["Block", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 12), nn.Linear(12, FEATURES)
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(12))
        self.branch = branch

    def forward(self, x):
        return x + self.branch(self, x)


def plain(block, x):
    return block.down(block.drop(functional.gelu(block.up(x)) * block.scale))


def network(branch: Callable[[Block, torch.Tensor], torch.Tensor]) -> Made:
    """Three blocks, of which the second one has the branch."""
    blocks = [Block(plain), Block(branch), Block(plain)]
    return classified(nn.Sequential(*blocks, nn.Linear(FEATURES, CLASSES)))


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sigmoid() * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid()  # the term x·σ(1 − σ) is lost


class RightBackward(WrongBackward):
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        sigmoid = x.sigmoid()
        return gradient * (sigmoid + x * sigmoid * (1 - sigmoid))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def other_masks(block, x):
    return checkpoint(plain, block, x, use_reentrant=False, preserve_rng_state=False)


def wrong_function(block, x):
    return block.down(WrongBackward.apply(block.up(x)) * block.scale)


def detached_term(block, x):
    hidden = functional.gelu(block.up(x))
    return block.down(hidden * block.scale / hidden.detach().norm(dim=1, keepdim=True))


def data_of_a_weight(block, x):
    return block.down(functional.gelu(block.up(x)) * block.scale.data)


def without_grad(block, x):
    with torch.no_grad():
        hidden = functional.gelu(block.up(x))
    return block.down(hidden * block.scale)


def scaled_by_a_hook(block, x):
    hidden = block.up(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * 1.01)
    return block.down(functional.gelu(hidden) * block.scale)


def item_of_a_tensor(block, x):
    return block.down(block.up(x) * block.scale) / (1.0 + float(block.scale.detach().norm()))


def quantized(block, x):
    return block.down(Rounded.apply(block.up(x)) * block.scale)


PLANTED = {
    other_masks: "1.down",
    wrong_function: "1.up",
    detached_term: "1.up",
    data_of_a_weight: "1",
    without_grad: "1.up",
    scaled_by_a_hook: "1.up",
    item_of_a_tensor: "1",
    quantized: "1.up",
}


@pytest.mark.parametrize("branch", PLANTED, ids=lambda branch: branch.__name__)
def test_a_planted_error_is_found_in_its_module(branch):
    report = check_gradients(*network(branch))
    named = [one.module for one in report.mismatches]
    assert not report.passed and PLANTED[branch] in named, report
    # What runs after the block is right; the error is in it or before.
    assert not any(name.startswith(("2", "3")) for name in named)
    assert named[0] == "1" or named[0].startswith("1."), named
    assert report.following.startswith(("1", "2")), report.following


def test_a_weight_that_is_read_as_data_is_named_with_its_parameter():
    (mismatch,) = check_gradients(*network(data_of_a_weight)).mismatches
    assert (mismatch.module, mismatch.parameters, mismatch.autograd) == ("1", ("scale",), 0.0)
    assert mismatch.differences != 0.0


def test_gradients_that_are_nan_are_named():
    def root_of_zero(block, x):
        return block.down((block.up(x) * 0.0).abs().sqrt() + block.scale)

    report = check_gradients(*network(root_of_zero))
    assert [one.autograd for one in report.mismatches if one.module == "1.up"] == [None]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(hidden, self.embed.weight).flatten(0, 1)


def attention() -> Made:
    tokens = torch.randint(0, 11, (2, 5))
    return Attention(), (tokens, tokens.flatten()), nn.CrossEntropyLoss()


def convolution() -> Made:
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    images = torch.randn(4, 1, 8, 8)
    images[:, :, :2] = 0.0
    return nn.Sequential(*layers), (images, torch.arange(4) % CLASSES), nn.CrossEntropyLoss()


def gated_recurrent() -> Made:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(FEATURES, 5, num_layers=2, batch_first=True, dropout=0.1)
            self.head = nn.Linear(5, CLASSES)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    inputs = torch.randn(ROWS, 4, FEATURES)
    return Recurrent(), (inputs, torch.arange(ROWS) % CLASSES), nn.CrossEntropyLoss()


def checkpointed() -> Made:
    return network(lambda block, x: checkpoint(plain, block, x, use_reentrant=False))


def checkpointed_reentrant() -> Made:
    return network(lambda block, x: checkpoint(plain, block, x, use_reentrant=True))


def right_function() -> Made:
    return network(lambda block, x: block.down(RightBackward.apply(block.up(x)) * block.scale))


def zero_biases_at_a_kink() -> Made:
    """Half the units are exactly at the kink of ReLU, and outputs begin at zero, as in LoRA."""
    first, last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
    nn.init.zeros_(first.bias)
    nn.init.zeros_(last.weight)
    made = classified(nn.Sequential(first, nn.ReLU(), last))
    made[1][0][: ROWS // 2] = 0.0
    return made


def in_single_precision() -> Made:
    """Casts to FP32 within, as norms and losses of language models do."""

    def branch(block, x):
        return plain(block, x.float()) * x.to(torch.float32).softmax(1, dtype=torch.float32)

    return network(branch)


def weight_norm() -> Made:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES))
    return classified(nn.Sequential(nn.BatchNorm1d(FEATURES), linear))


def deep_with_many_kinks() -> Made:
    layers = [layer for _ in range(8) for layer in (nn.Linear(FEATURES, FEATURES), nn.ReLU())]
    return classified(nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES)))


def unused_and_frozen() -> Made:
    """A branch without influence, a bias that a normalization cancels, and a frozen layer."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES)
            self.norm = nn.BatchNorm1d(FEATURES)
            self.unused, self.head = nn.Linear(2, 2), nn.Linear(FEATURES, CLASSES)
            self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)

        def forward(self, x):
            return self.head(self.frozen(self.norm(self.first(x))))

    return classified(Partly())


def absolute_loss() -> Made:
    def loss(model, batch):
        return model(batch).abs().max()

    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU()), torch.randn(ROWS, FEATURES), loss


class Spectral(nn.Module):
    """A layer as in Fourier neural operators. real_only: its gradient lacks the imaginary part."""

    def __init__(self, *, real_only: bool = False) -> None:
        super().__init__()
        self.real_only = real_only
        self.weight = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=torch.complex64))

    def forward(self, x):
        weight: Tensor = self.weight
        if self.real_only:
            weight = torch.complex(weight.real, weight.imag.detach())
        return torch.fft.irfft(torch.fft.rfft(x) * weight, n=FEATURES)


def complex_weights() -> Made:
    return classified(nn.Sequential(Spectral(), nn.Linear(FEATURES, CLASSES)))


HEALTHY = (
    complex_weights,
    attention,
    convolution,
    gated_recurrent,
    checkpointed,
    checkpointed_reentrant,
    right_function,
    zero_biases_at_a_kink,
    in_single_precision,
    weight_norm,
    absolute_loss,
    deep_with_many_kinks,
    unused_and_frozen,
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_a_healthy_model_passes(make, seed):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check_gradients(*make())
    assert report.passed and not report.unmeasured, report


def test_a_loss_that_is_not_the_same_twice_is_reported_and_nothing_else():
    generator = iter(range(1000))

    class Counting(nn.Linear):
        def forward(self, x):
            return super().forward(x) + next(generator)

    report = check_gradients(Counting(2, 1), torch.ones(1, 2), lambda m, b: m(b).sum())
    assert report.unrepeatable == "loss" and not report.mismatches
    assert report.verdict.startswith("The loss is not the same twice with the same random numbers")


def test_gradients_that_are_not_the_same_twice_are_reported():
    generator = iter(range(1000))

    class Counting(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            out.register_hook(lambda gradient: gradient * next(generator))
            return out

    report = check_gradients(Counting(2, 1), torch.ones(1, 2), lambda m, b: m(b).sum())
    assert report.unrepeatable == "gradients" and not report.passed


def test_the_model_is_as_it_was():
    made = network(other_masks)
    before = {name: one.clone() for name, one in made[0].double().state_dict().items()}
    torch.manual_seed(5)
    check_gradients(*made)
    assert float(torch.rand(())) == float(
        torch.rand((), generator=torch.Generator().manual_seed(5))
    )
    after = made[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(one.grad is None for one in made[0].parameters())


def test_a_model_that_cannot_run_in_fp64_is_refused_in_one_line():
    class Kernel(nn.Linear):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise RuntimeError("kernel: no float64\n  (stack)")
            return super().forward(x)

    with pytest.raises(CompareError, match=r"does not run in FP64, in which .* kernel: no float64"):
        check_gradients(*classified(Kernel(FEATURES, CLASSES)))
    with pytest.raises(CompareError, match="no parameter that requires a gradient"):
        check_gradients(*classified(nn.Linear(FEATURES, CLASSES).requires_grad_(False)))
    with pytest.raises(CompareError, match="loss: is nan"):
        check_gradients(nn.Linear(2, 1), torch.ones(1, 2), lambda m, b: m(b).sum() * float("nan"))


class ThroughNumpy(torch.autograd.Function):
    """Right, but of single precision: the loss has its noise."""

    @staticmethod
    def forward(ctx, x, significant):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.tanh(x.detach().numpy().astype(significant)).astype(float))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh() ** 2), None


def test_noise_of_the_loss_raises_the_limit_and_what_it_hides_is_named():
    def through(significant: type) -> Made:
        return network(lambda block, x: block.down(ThroughNumpy.apply(block.up(x), significant)))

    single = check_gradients(*through(np.float32))
    assert single.passed and single.noise > 1e-11 and single.coarsest > 1e-4, single
    half = check_gradients(*through(np.float16))
    assert not half.mismatches and len(half.unmeasured) > 3 and half.noise > 1e-7, half


SCRIPT = """
from tests.agent.plan.test_gradient_check import *

def wrong():
    return network(wrong_function)

def right():
    return network(plain)
"""


def test_the_command_prints_exits_and_refuses(tmp_path):
    script = tmp_path / "factories.py"
    script.write_text(SCRIPT)

    def run(*arguments: str):
        return CliRunner().invoke(main, ["compare", *arguments])

    done = run(f"{script}:right", "--gradients")
    assert done.exit_code == 0 and "Gradients agree with finite differences" in done.output, (
        done.output
    )
    done = run(f"{script}:wrong", "--gradients")
    assert done.exit_code == 1 and "1.up" in done.output, done.output
    assert "straight-through estimators" in done.output
    document = json.loads(run(f"{script}:wrong", "--gradients", "--json").output)
    assert document["format"] == "mp_agent gradient check" and not document["passed"]
    assert "1.up" in [one["module"] for one in document["mismatches"]]
    assert run(f"{script}:right", "--gradients", "--dtype", "bf16").exit_code == 2
    assert run(str(script), "--gradients").exit_code == 2


def test_an_imaginary_part_without_a_gradient_is_found():
    broken = nn.Sequential(Spectral(real_only=True), nn.Linear(FEATURES, CLASSES))
    (found,) = check_gradients(*classified(broken)).mismatches
    assert found.module == "0"
