"""The rows of attention and output logits; what holds for every family is in `test_families`."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from mp_agent.probe.instruments.attention import NO_ATTENTION, NO_LOSS
from mp_agent.records.columns import ATTENTION, LOGITS
from tests.agent.probe.scenarios import training

pytestmark = pytest.mark.usefixtures("nothing_compiled")

FUNCTIONS = ("scaled_dot_product_attention", "softmax", "cross_entropy")
ORIGINALS = {name: getattr(F, name) for name in FUNCTIONS}
Attend = Callable[..., torch.Tensor]


class Attention(nn.Module):
    def __init__(self, call: Callable[[], Attend]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.call = call

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in (self.query(inputs), self.key(inputs), inputs)
        )
        out = self.call()(query, key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2)

    def largest(self, inputs: torch.Tensor) -> float:
        query, key = (
            part.double().unflatten(-1, (2, 4)).transpose(1, 2)
            for part in (self.query(inputs), self.key(inputs))
        )
        length = inputs.shape[1]
        below = torch.ones(length, length, dtype=torch.bool).tril()
        logits = (query @ key.mT / sqrt(4)).masked_fill(~below, -torch.inf)
        return float(logits.max())


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.head = nn.Linear(8, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.attention(inputs))
        return out


class Whole(nn.Module):
    """`nn.MultiheadAttention` on one input."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5)
        self.need_weights = need_weights

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        called = self.inner(inputs, inputs, inputs, need_weights=self.need_weights)
        out: torch.Tensor = called[0]
        return out

    def largest(self, inputs: torch.Tensor) -> float:
        joint = F.linear(inputs, self.inner.in_proj_weight, self.inner.in_proj_bias).double()
        query, key, _ = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in joint.chunk(3, dim=-1)
        )
        return float((query @ key.mT / sqrt(4)).max())


def loss_of_logits(logits: torch.Tensor) -> torch.Tensor:
    flat = logits.flatten(0, 1)
    return F.cross_entropy(flat, torch.arange(len(flat)) % 5)


train = partial(
    training.train,
    inputs_of=lambda step: torch.randn(2, 6, 8),
    loss_of=loss_of_logits,
    lr=0.1,
)


def are_restored() -> bool:
    mine = (scaled_dot_product_attention, sdpa, cross_entropy)
    theirs = (ORIGINALS[FUNCTIONS[0]], ORIGINALS[FUNCTIONS[0]], ORIGINALS[FUNCTIONS[2]])
    kept = all(getattr(F, name) is ORIGINALS[name] for name in FUNCTIONS)
    return kept and all(a is b for a, b in zip(mine, theirs, strict=True))


def by_module() -> Attend:
    return F.scaled_dot_product_attention


WAYS: dict[str, Callable[[], Any]] = {
    "by module": lambda: Attention(by_module),
    "imported by name": lambda: Attention(lambda: scaled_dot_product_attention),
    "imported under another name": lambda: Attention(lambda: sdpa),
    "nn.MultiheadAttention": lambda: Whole(need_weights=False),
    "nn.MultiheadAttention with weights": lambda: Whole(need_weights=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_largest_attention_logit_is_that_of_float64(way, watch):
    torch.manual_seed(0)
    model = Model(WAYS[way]())
    watched = watch(measure_attention=True)
    copies: list[Any] = []
    inputs = train(model, 3, between=lambda step: copies.append(copy.deepcopy(model.attention)))

    (row,) = watched.read(one_schema=False).rows(ATTENTION)[2].values()
    with torch.no_grad():
        expected = copies[0].largest(inputs[1])  # as the first step left the weights
    assert row["logit_max"] == pytest.approx(expected, rel=1e-5)
    assert row["nonfinite_elements"] == 0.0
    causal = isinstance(model.attention, Attention)
    assert row["elements"] == 2 * 2 * (21 if causal else 36)
    assert are_restored()


def test_a_layer_is_the_innermost_module_that_calls(watch):
    model = Model(nn.Sequential(nn.Sequential(Whole(True)), WAYS["by module"]()))
    watched = watch(measure_attention=True)
    train(model, 2)

    assert list(watched.read(one_schema=False).rows(ATTENTION)[2]) == [
        "attention.0.0.inner",
        "attention.1",
    ]


@pytest.mark.parametrize(
    "loss",
    [
        lambda *args: F.cross_entropy(*args),
        nn.CrossEntropyLoss(),
        lambda *args: cross_entropy(*args),
    ],
    ids=["by module", "nn.CrossEntropyLoss", "imported by name"],
)
def test_output_logits_are_those_that_the_loss_is_given(loss, watch):
    torch.manual_seed(0)
    model = Model(WAYS["by module"]())
    kept: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    watched = watch(measure_attention=True)
    target = torch.arange(12) % 5
    train(model, 2, loss_of=lambda logits: loss(logits.flatten(0, 1), target))

    (row,) = watched.read(one_schema=False).rows(LOGITS)[2].values()
    logits = kept[1].double().flatten(0, 1)
    sums = logits.exp().sum(1).log()
    assert row["rows"] == 12 and row["nonfinite_rows"] == 0
    assert row["logit_max"] == pytest.approx(float(logits.max()), rel=1e-6)
    assert row["logsumexp_max"] == pytest.approx(float(sums.max()), rel=1e-5)
    assert row["logsumexp_min"] == pytest.approx(float(sums.min()), rel=1e-5)
    assert row["logsumexp_sum"] == pytest.approx(float(sums.sum()), rel=1e-5)


def test_what_is_not_called_is_reported(watch):
    model = Model(nn.Identity())
    watched = watch(measure_attention=True)
    train(model, 2, loss_of=training.mean_of_squares)

    assert {NO_ATTENTION, NO_LOSS} <= set(watched.state().unsupported)
    (row,) = watched.read(one_schema=False).rows(LOGITS)[2].values()
    assert row["rows"] == 0.0


def test_evaluation_other_models_and_losses_without_gradient_are_left_out(watch):
    model, other = Model(WAYS["by module"]()), Model(WAYS["by module"]())
    watched = watch(measure_attention=True)

    def between(step: int) -> None:
        huge = torch.full((2, 6, 8), 1e4)
        other(huge)
        model.eval()
        with torch.no_grad():
            cross_entropy(model(huge).flatten(0, 1), torch.zeros(12, dtype=torch.long))
        model.train()

    train(model, 2, between=between)
    found = watched.read(one_schema=False)
    (row,) = found.rows(ATTENTION)[2].values()
    assert row["logit_max"] < 1e3
    (row,) = found.rows(LOGITS)[2].values()
    assert row["rows"] == 12 and row["logit_max"] < 1e3


def test_an_odd_call_raises_its_own_error_and_no_other(watch):
    model = Model(WAYS["by module"]())
    watch(measure_attention=True)
    train(model, 1)
    assert not are_restored()
    odd: Any = F.cross_entropy
    with pytest.raises(TypeError):
        odd(3)
    odd = F.scaled_dot_product_attention
    with pytest.raises(TypeError):
        odd(None, None, None)
    kept = pickle.loads(pickle.dumps(F.cross_entropy))
    assert copy.deepcopy(F.cross_entropy) is kept
    assert F.cross_entropy.__name__ == "cross_entropy"
    train(model, 1)
    assert are_restored()


def test_a_frozen_encoder_keeps_its_fast_path(watch):
    """It is taken in eval mode without gradients, and not where modules have hooks."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    encoder = layer.eval().requires_grad_(False)
    taken: list[bool] = []
    inner: Any = vars(torch)["_transformer_encoder_layer_fwd"]

    def fast(*args: Any) -> Any:
        taken.append(True)
        return inner(*args)

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "_transformer_encoder_layer_fwd", fast)
                out: torch.Tensor = self.encoder(inputs)
            return out

    watched = watch(measure_attention=True)
    train(Model(Frozen()), 2)
    assert taken == [True, True]
    assert NO_ATTENTION in watched.state().unsupported


def test_an_encoder_that_trains_is_measured(watch):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    watched = watch(measure_attention=True)
    train(Model(layer), 2)
    assert list(watched.read(one_schema=False).rows(ATTENTION)[2]) == ["attention.self_attn"]
