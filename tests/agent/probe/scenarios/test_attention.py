"""Attention and output logits are measured in the first forward pass of sampled steps."""

import copy
import pickle
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from mp_agent.probe.instruments.attention import COMPILED, NO_ATTENTION, NO_LOSS
from mp_agent.records.columns import ATTENTION, LOGITS
from tests.agent.probe.rings import RingContents, read_ring

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


def train(
    model: nn.Module,
    steps: int,
    *,
    loss: Callable[..., torch.Tensor] = lambda *args: F.cross_entropy(*args),
    between: Callable[[int], None] = lambda step: None,
) -> list[torch.Tensor]:
    """Train, and return the inputs of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = []
    for step in range(1, steps + 1):
        inputs.append(torch.randn(2, 6, 8))
        logits = model(inputs[-1])
        loss(logits.flatten(0, 1), torch.arange(12) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return inputs


def contents(watched: Any) -> RingContents:
    """What is in the ring; the modules that compute attention make a schema of their own."""
    return read_ring(watched.writer.path, one_schema=False)


def rows(ring: RingContents, family: Any) -> dict[int, dict[str, dict[str, float]]]:
    """The rows of a family by step, layer and column."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for table, schema in zip(ring.layers, ring.layer_schemas, strict=True):
        if family.name in table.families:
            values = zip(schema.layers, table.families[family.name].tolist(), strict=True)
            found[table.sequence] = {
                layer.name: dict(zip(family.names, row, strict=True))
                for layer, row in values
                if row[0] == row[0]
            }
    return found


def are_restored() -> bool:
    mine = (scaled_dot_product_attention, sdpa, cross_entropy)
    theirs = (ORIGINALS[FUNCTIONS[0]], ORIGINALS[FUNCTIONS[0]], ORIGINALS[FUNCTIONS[2]])
    kept = all(getattr(F, name) is ORIGINALS[name] for name in FUNCTIONS)
    return kept and all(a is b for a, b in zip(mine, theirs, strict=True))


WAYS: dict[str, Callable[[], Any]] = {
    "by module": lambda: Attention(lambda: F.scaled_dot_product_attention),
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

    (row,) = rows(contents(watched), ATTENTION)[2].values()
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

    assert list(rows(contents(watched), ATTENTION)[2]) == ["attention.0.0.inner", "attention.1"]


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
    train(model, 2, loss=loss)

    (row,) = rows(contents(watched), LOGITS)[2].values()
    logits = kept[1].double().flatten(0, 1)
    sums = logits.exp().sum(1).log()
    assert row["rows"] == 12 and row["nonfinite_rows"] == 0
    assert row["logit_max"] == pytest.approx(float(logits.max()), rel=1e-6)
    assert row["logsumexp_max"] == pytest.approx(float(sums.max()), rel=1e-5)
    assert row["logsumexp_min"] == pytest.approx(float(sums.min()), rel=1e-5)
    assert row["logsumexp_sum"] == pytest.approx(float(sums.sum()), rel=1e-5)


def test_functions_are_replaced_for_one_forward_pass_only(watch):
    model = Model(WAYS["by module"]())
    watch(measure_attention=True)
    replaced = []
    train(model, 11, between=lambda step: replaced.append(not are_restored()))
    assert [step for step, each in enumerate(replaced, 1) if each] == [1, 9]


def test_detaching_and_not_asking_leave_the_functions_as_they_are(watch):
    model = Model(WAYS["by module"]())
    watched = watch()
    train(model, 2, between=lambda step: check(are_restored()))
    assert not watched.read().schema.columns(ATTENTION.name)
    watched.probe.detach()

    watched = watch(measure_attention=True)
    train(model, 1)
    assert not are_restored()
    watched.probe.detach()
    assert are_restored()


def check(condition: bool) -> None:
    assert condition


def test_what_is_not_called_is_reported(watch):
    model = Model(nn.Identity())
    watched = watch(measure_attention=True)
    train(model, 2, loss=lambda logits, target: logits.square().mean())

    assert {NO_ATTENTION, NO_LOSS} <= set(watched.state().unsupported)
    (row,) = rows(contents(watched), LOGITS)[2].values()
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
    found = contents(watched)
    (row,) = rows(found, ATTENTION)[2].values()
    assert row["logit_max"] < 1e3
    (row,) = rows(found, LOGITS)[2].values()
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


def test_training_is_the_same_to_the_bit(watch):
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Model(nn.Sequential(Whole(True), Whole(False), WAYS["by module"]()))
        train(model, 3)
        return [parameter.detach() for parameter in model.parameters()]

    without = trained()
    watch(measure_attention=True)
    for before, after in zip(without, trained(), strict=True):
        assert torch.equal(before, after)


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
    assert list(rows(contents(watched), ATTENTION)[2]) == ["attention.self_attn"]


def test_compiled_programs_are_reported_and_compile_alike(watch):
    dynamo = pytest.importorskip("torch._dynamo")
    testing = pytest.importorskip("torch._dynamo.testing")

    def count(kind: str) -> int:
        dynamo.reset()
        dynamo.utils.counters.clear()
        graphs = testing.CompileCounter()
        model = Model(WAYS["by module"]())
        if kind == "model":
            optimized: Any = torch.compile(model, backend=graphs)
            train(optimized, 3)
        else:
            optimizer = torch.optim.SGD(model.parameters())
            target = torch.arange(12) % 5
            forward = torch.compile(
                lambda inputs: F.cross_entropy(model(inputs).flatten(0, 1), target), backend=graphs
            )
            for _ in range(3):
                forward(torch.randn(2, 6, 8)).backward()
                optimizer.step()
        dynamo.reset()
        return int(graphs.frame_count)

    without = [count("model"), count("function")]
    watched = watch(measure_attention=True)
    assert [count("model"), count("function")] == without
    assert COMPILED in watched.state().unsupported
    dynamo.utils.counters.clear()
