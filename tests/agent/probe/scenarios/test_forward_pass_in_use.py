"""What a script does with functions and modules while a sampled forward pass is measured."""

import copy
import gc
import pickle
from collections.abc import Callable
from math import isnan
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

from mp_agent.probe.instruments import activations
from mp_agent.probe.statistics import pieces
from mp_agent.records.columns import ACTIVATIONS, ATTENTION, FP8, ROUTERS
from tests.agent.probe.rings import read_ring

pytestmark = pytest.mark.usefixtures("nothing_compiled")

KEPT: dict[str, Any] = {
    "loss": F.cross_entropy,
    "softmax": F.softmax,
    "attention": F.scaled_dot_product_attention,
}
"""The functions of torch, where nothing takes their place."""
FAMILIES = {"measure_attention": True, "measure_activations": True}


class Attention(nn.Module):
    def __init__(self, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.mask = mask

    def split(self, inputs: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = self.project(inputs).unflatten(-1, (2, 4)).transpose(1, 2)
        return parts

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = self.split(inputs)
        out = F.scaled_dot_product_attention(parts, parts[:, :, :5], parts[:, :, :5], self.mask)
        return out.transpose(1, 2).flatten(2)


def model_of(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 5))


def train(
    model: nn.Module, steps: int, between: Callable[[int], object] = lambda step: None
) -> list[torch.Tensor]:
    """Train, and return the inputs of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = []
    for step in range(1, steps + 1):
        inputs.append(torch.randn(2, 6, 8))
        F.cross_entropy(model(inputs[-1]).flatten(0, 1), torch.arange(12) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return inputs


def tables(watched: Any, family: Any) -> dict[int, dict[str, dict[str, float]]]:
    """The rows of a family by step, layer and column."""
    ring = read_ring(watched.writer.path, one_schema=False)
    found: dict[int, dict[str, dict[str, float]]] = {}
    for table, schema in zip(ring.layers, ring.layer_schemas, strict=True):
        if family.name in table.families:
            rows = table.families[family.name].tolist()
            found[table.sequence] = {
                layer.name: dict(zip(family.names, row, strict=True))
                for layer, row in zip(schema.layers, rows, strict=True)
                if row[0] == row[0]
            }
    return found


def measuring(watch: Callable[..., Any]) -> tuple[nn.Sequential, Any]:
    """A model whose next forward pass is measured."""
    model, watched = model_of(Attention()), watch(**FAMILIES)
    train(model, 1)
    assert F.cross_entropy is not KEPT["loss"]
    return model, watched


class WithSpare(nn.Module):
    """Has a layer that the loss does not use: its order among the others is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_whose_order_is_looked_at_can_be_scripted(watch):
    model, watched = WithSpare(), watch()
    train(model, 1)
    assert model.used._forward_hooks, "the order of its modules is about to be looked at"
    scripted: Any = torch.jit.script(model)
    assert torch.equal(scripted(torch.ones(8)), model(torch.ones(8)))
    train(model, 1)
    assert watched.state().probe_errors == 0


class Scored(nn.Module):
    """Calls all of the functions."""

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(inputs, inputs, inputs)
        return F.cross_entropy(F.softmax(mixed, dim=-1), target)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_models_can_be_scripted(watch):
    model, watched = measuring(watch)
    scripted: Any = torch.jit.script(Scored())
    inputs, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    assert torch.equal(scripted(inputs, target), Scored()(inputs, target))

    train(model, 8)
    assert model[1]._forward_hooks, "the next sampled step is being measured"
    head: Any = torch.jit.script(model[1])
    assert torch.equal(head(torch.ones(8)), model[1](torch.ones(8)))

    train(model, 1)
    assert watched.state().probe_errors == 0
    assert not tables(watched, ACTIVATIONS), "what was scripted meanwhile is not measured"


def _half(value: float) -> float:
    return value / 2


class Halved:
    """Uses a name of its module, as the functional optimizers in `torch.distributed.optim` do."""

    def __init__(self, value: float) -> None:
        self.value = _half(value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_classes_that_use_names_of_their_module_can_be_scripted(watch):
    watch()
    assert torch.jit.script(Halved) is Halved


class Tagged(torch.Tensor):
    """A tensor that has functions of its own for some of torch's."""

    called: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.called.extend(name for name, each in KEPT.items() if each is func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_with_functions_of_their_own_are_asked_for_the_functions_of_torch(watch):
    _, watched = measuring(watch)
    Tagged.called.clear()
    logits = torch.randn(3, 5).as_subclass(Tagged)
    F.cross_entropy(logits, torch.tensor([0, 1, 2]))
    F.softmax(logits, dim=-1)
    F.scaled_dot_product_attention(logits[None, None], logits[None, None], logits[None, None])
    assert Tagged.called == ["loss", "softmax", "attention"]
    assert F.cross_entropy is not KEPT["loss"], "later calls are still seen"
    watched.probe.detach()
    assert F.cross_entropy is KEPT["loss"]


def test_modes_get_the_functions_of_torch(watch):
    measuring(watch)
    seen: list[object] = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    with Noting():
        F.cross_entropy(logits, target)
    assert [each for each in seen if each is KEPT["loss"]] == [KEPT["loss"]]
    assert not [each for each in seen if type(each).__module__.startswith("mp_agent")]


def test_a_handler_that_raises_leaves_the_call_seen_and_the_functions_restorable(watch):
    _, watched = measuring(watch)

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise KeyError(func)

    with pytest.raises(KeyError):
        F.softmax(torch.randn(3).as_subclass(Refusing), dim=-1)
    assert F.softmax is not KEPT["softmax"]
    watched.probe.detach()
    assert F.softmax is KEPT["softmax"]


def test_a_function_equals_what_stands_in_for_it(watch):
    measuring(watch)
    assert F.softmax is not KEPT["softmax"]
    assert KEPT["loss"] == F.cross_entropy
    assert {KEPT["loss"]: 1, KEPT["softmax"]: 2}[F.softmax] == 2
    assert F.softmax != KEPT["loss"]
    kept = pickle.loads(pickle.dumps({F.softmax: F.cross_entropy}))
    assert copy.deepcopy(F.softmax) in kept


@pytest.mark.parametrize("shape", [(6, 5), (3, 5), (6, 6)])
@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")
def test_a_causal_bias_hides_what_its_diagonal_hides(variant, shape, watch):
    """It is a tensor of memory that was never written to."""
    length, keys = shape

    class Biased(Attention):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            parts = self.split(inputs)
            some = parts[:, :, :keys]
            out = F.scaled_dot_product_attention(
                parts[:, :, :length], some, some, variant(length, keys)
            ).nan_to_num()
            padded = F.pad(out, (0, 0, 0, inputs.shape[1] - length))
            return padded.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    block = Biased()
    model, watched = model_of(block), watch(measure_attention=True)
    copies: list[Biased] = []
    inputs = train(model, 2, lambda step: copies.append(copy.deepcopy(block)))

    (row,) = tables(watched, ATTENTION)[2].values()
    diagonal = keys - length if variant is causal_lower_right else 0
    shown = torch.ones(length, keys, dtype=torch.bool).tril(diagonal)
    with torch.no_grad():
        parts = copies[0].split(inputs[1]).double()
    logits = (parts[:, :, :length] @ parts[:, :, :keys].mT / 2.0)[..., shown]
    assert row["elements"] == 2 * 2 * int(shown.sum())
    assert row["logit_max"] == pytest.approx(float(logits.max()), rel=1e-5)
    assert watched.state().probe_errors == 0


def test_modules_that_are_added_are_measured_under_their_own_names(watch):
    blocks = nn.Sequential(Attention())
    model, watched = nn.Sequential(blocks, nn.Linear(8, 5)), watch(**FAMILIES)

    def grow(step: int) -> None:
        if step == 5:
            blocks.insert(0, nn.Sequential(nn.Identity(), Attention()))

    train(model, 10, grow)
    attention, outputs = tables(watched, ATTENTION), tables(watched, ACTIVATIONS)
    assert list(attention[2]) == ["0.0"]
    assert list(attention[10]) == ["0.0.1", "0.1"]
    assert list(outputs[2]) == ["0.0.project", "1"]
    assert list(outputs[10]) == ["0.0.0", "0.0.1.project", "0.1.project", "1"]
    assert watched.state().probe_errors == 0


def test_a_module_that_takes_another_ones_place_is_measured(watch):
    model, watched = model_of(Attention()), watch(**FAMILIES)

    def replace(step: int) -> None:
        if step == 5:
            model[1] = nn.Linear(8, 5)

    train(model, 10, replace)
    assert list(tables(watched, ACTIVATIONS)[10]) == ["0.0.project", "1"]


def is_row(candidate: object) -> bool:
    """Return whether it is a row of statistics of a module."""
    columns = {len(family.names) for family in (ACTIVATIONS, FP8, ROUTERS)}
    return (
        torch.is_tensor(candidate)
        and candidate.dtype is torch.float64
        and candidate.dim() == 1
        and candidate.numel() in columns
    )


def test_forward_passes_that_no_backward_follows_all_count_and_are_not_kept(watch, monkeypatch):
    monkeypatch.setattr(pieces, "ROWS_AT_MOST", 8)
    monkeypatch.setattr(activations, "_LOOK_FOR_FREED", 16)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))
    watched = watch(measure_activations=True, measure_fp8=True, routers={"1": 2})
    train(model, 1)
    alive = []
    for _ in range(3):
        for _ in range(40):
            model(torch.ones(2, 6, 8))
        gc.collect()
        alive.append(sum(map(is_row, gc.get_objects())))
        kinds = [type(each) for each in gc.get_objects()]
        assert kinds.count(activations._Watched) <= 2 * 16
    assert 0 < max(alive) <= 5 * 8  # rows of two layers in two families, and of a router
    train(model, 1)

    elements = {name: row["elements"] for name, row in tables(watched, ACTIVATIONS)[2].items()}
    assert elements == {"0": 121 * 12 * 6, "1": 121 * 12 * 5}
    fp8 = tables(watched, FP8)[2]
    assert fp8["0"]["weight_elements"] == 121 * 48
    assert fp8["0"]["gradient_elements"] == 12 * 6


def test_a_gradient_is_found_after_forward_passes_whose_graphs_are_gone(watch, monkeypatch):
    monkeypatch.setattr(activations, "_LOOK_FOR_FREED", 16)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5))
    watched = watch(measure_activations=True)
    train(model, 1)
    for _ in range(40):
        model(torch.ones(2, 6, 8))
    spoil: Any = lambda module, made, got: (made[0] * torch.nan,)  # noqa: E731
    model[1].register_full_backward_hook(spoil)
    train(model, 1)
    rows = tables(watched, ACTIVATIONS)[2]
    assert not isnan(rows["0"]["nonfinite_gradient_call"])
    assert isnan(rows["2"]["nonfinite_gradient_call"])
