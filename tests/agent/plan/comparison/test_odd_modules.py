"""Modules that are shared, called often, return containers, or change what they read."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from mp_agent.errors import CompareError
from mp_agent.plan.comparison.api import compare

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def total(model, batch):
    outputs = model(batch)
    return outputs.float().square().mean()


def compared(model, dtypes=("bf16",), batch=X, loss=total, **options):
    torch.manual_seed(2)
    options.setdefault("search_trials", 0)
    return compare(model, batch, loss, dtypes=dtypes, **options).candidates


class Body(nn.Module):
    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.run(self, x)


def calls_of(candidate, name):
    return [one for one in candidate.calls if one.module == name]


def test_a_module_that_is_called_several_times_has_a_row_for_each_call():
    model = Body(lambda self, x: self.layer(self.layer(self.layer(x))), layer=nn.Linear(8, 8))
    (found,) = compared(model)
    calls = calls_of(found, "layer")
    assert [one.order for one in sorted(calls, key=lambda c: c.order)] == [2, 3, 4]
    assert all(one.own is not None and one.gradient is not None for one in calls)


def test_shared_modules_and_weights_are_one():
    layer = nn.Linear(8, 8)
    tied = nn.Linear(8, 8)
    tied.weight = layer.weight
    model = Body(lambda self, x: self.b(self.a(x)) + self.c(x), a=layer, b=layer, c=tied)
    (found,) = compared(model)
    assert len(calls_of(found, "a")) == 2 and not calls_of(found, "b")
    assert [one.name for one in found.parameters].count("a.weight") == 1


def test_a_tied_weight_may_be_kept_in_one_of_its_modules():
    class Loud(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1e5 / 1e5

    first, second = Loud(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    model = Body(lambda self, x: self.b(self.a(x)), a=first, b=second)
    (found,) = compared(model, ["fp16"], search_trials=20)
    assert found.keep is not None and found.keep.kept == ("a",) and found.keep.verdict.passed


@dataclass
class Outputs:
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize(
    "wrap", [lambda a, b: (a, b), lambda a, b: {"a": a, "b": [b]}, lambda a, b: Outputs(a, b)]
)
def test_containers_are_compared_with_all_their_tensors(wrap):
    def unwrap(value):
        if isinstance(value, dict):
            return value["a"] + value["b"][0]
        return sum(value) if isinstance(value, tuple) else value.left + value.right

    inner = Body(lambda self, x: wrap(self.a(x), self.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model = Body(lambda self, x: unwrap(self.inner(x)), inner=inner)
    (found,) = compared(model)
    (call,) = calls_of(found, "inner")
    assert call.output.elements == 2 * X.numel()
    assert call.own is not None and call.gradient is not None


def test_operations_in_place_do_not_disturb_each_other():
    def run(self, x):
        y = self.last(self.act(self.layer(x)))
        y += x
        return y.mul_(2)

    model = Body(run, layer=nn.Linear(8, 8), act=nn.ReLU(inplace=True), last=nn.Linear(8, 8))
    (found,) = compared(model)
    own = {one.module: one for one in found.calls}
    assert own["layer"].own is not None and own["act"].own is not None
    # ReLU adds nothing but the rounding of its input.
    assert own["act"].own.relative_l2 < 2**-8


def test_what_a_module_changes_in_place_outside_of_itself_is_said():
    model = Body(
        lambda self, x: self.change(x * 1.0),
        change=Body(lambda self, x: x.mul_(2).add(1)),
    )
    (found,) = compared(model)
    (call,) = calls_of(found, "change")
    assert call.own is None and call.own_missing == "an input was changed in place"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_compared_once(reentrant):
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))

    def run(self, x):
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=reentrant))

    model = Body(run, first=nn.Linear(8, 8), block=block, last=nn.Linear(8, 8))
    (found,) = compared(model)
    assert found.failure == "" and len(found.calls) == 8
    assert {one.name for one in found.parameters} == {n for n, _ in model.named_parameters()}
    assert all(one.gradient.relative_l2 < 0.1 for one in found.parameters)
    # What is run again in a backward pass of its own has no gradient of its output here.
    assert (calls_of(found, "block.0")[0].gradient is None) is reentrant


def test_dropout_drops_the_same_elements_on_both_sides():
    (a, b, c) = compared(
        nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4)),
        ["fp16", "bf16-autocast", "fp8-e4m3"],
    )
    for found in (a, b, c):
        (call,) = calls_of(found, "1")
        assert call.output.relative_l2 < 0.2 and call.own.relative_l2 < 0.1


def test_batch_norm_is_compared_while_it_trains():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    (found,) = compared(model)
    (call,) = calls_of(found, "1")
    assert call.own is not None and call.own.relative_l2 < 0.05
    assert call.gradient_own is not None and call.gradient_own.relative_l2 < 0.1
    assert int(model.state_dict()["1.num_batches_tracked"]) == 0


def test_control_flow_that_depends_on_the_precision_is_said_and_the_rest_compared():
    def run(self, x):
        y = self.first(x)
        # True only where the numbers are not those of FP32.
        if y.dtype is torch.bfloat16:
            y = self.extra(y)
        return self.last(y)

    inner = Body(run, first=nn.Linear(8, 8), extra=nn.Identity(), last=nn.Linear(8, 8))
    model = Body(lambda self, x: self.after(self.inner(x)), inner=inner, after=nn.Linear(8, 8))
    (found,) = compared(model)
    assert "control flow depends on the precision" in found.notes[0]
    assert calls_of(found, "inner.first") and not calls_of(found, "inner.extra")
    assert calls_of(found, "inner") and calls_of(found, "after") and calls_of(found, "")


def test_an_argument_that_may_change_while_it_is_used_is_said():
    class Cache:
        pass

    class Cached(nn.Module):
        def forward(self, x, cache):
            return x + 1

    model = Body(lambda self, x: self.layer(x, Cache()), layer=Cached())
    (found,) = compared(model)
    assert calls_of(found, "layer")[0].own_missing.startswith("it gets a Cache")


@pytest.mark.slow
def test_compiled_modules_are_compared_uncompiled_and_that_is_said():
    inner: Any = torch.compile(nn.Linear(8, 8))
    model: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), inner))
    report = compare(model, X, total, dtypes=["bf16"], search_trials=0)
    assert len(report.notes) == 2 and "compiled" in report.notes[0]
    assert len(calls_of(report.candidates[0], "1")) == 1


def test_models_without_parameters_or_gradients_are_compared_forward():
    (found,) = compared(nn.Sequential(nn.Softmax(-1), nn.Tanh()))
    assert len(found.calls) == 4 and found.parameters == ()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(8, 8, device="meta"), "weight is on the meta device"),
        (nn.LazyLinear(8), "weight is not initialized"),
        (torch.jit.trace(nn.Linear(8, 8), X), "is a ScriptModule"),
    ],
    ids=["meta", "lazy", "script"],
)
def test_what_cannot_be_compared_is_named(model, message):
    with pytest.raises(CompareError, match=message):
        compare(model, X, total, dtypes=["bf16"])


def test_an_empty_batch_and_one_element():
    (found,) = compared(nn.Linear(8, 8), batch=X[:0], loss=lambda m, b: m(b).sum())
    assert found.output.elements == 0 and found.failure == ""
    (found,) = compared(nn.Linear(1, 1), batch=torch.ones(1, 1))
    assert found.output.elements == 1


def test_sparse_gradients_are_compared_as_dense_ones():
    table = nn.EmbeddingBag(16, 8)
    model = nn.Sequential(table, nn.Linear(8, 2))
    dense, sparse = (
        compared(model, batch=torch.arange(12).view(4, 3))[0] for table.sparse in (False, True)
    )
    assert sparse.verdict == dense.verdict
    assert sparse.parameters == dense.parameters


def test_of_a_loader_the_first_batch_is_compared():
    model = nn.Linear(8, 8)
    loader: DataLoader[Any] = DataLoader(list(X), batch_size=2)  # type: ignore[arg-type]
    assert compared(model, batch=loader) == compared(model, batch=X[:2])
    loader = DataLoader(list(X[:0]))  # type: ignore[arg-type]
    with pytest.raises(CompareError, match="batch: the DataLoader is empty"):
        compared(model, batch=loader)


def test_complex_outputs_are_compared_like_real_ones():
    def run(self, x):
        return torch.fft.rfft((self.layer(x) * 1e5 / 1e5).float())

    model = Body(run, layer=nn.Linear(8, 8))
    (lost,) = compared(model, ["fp16"], loss=lambda model, batch: model(batch).abs().mean() * 0)
    assert not lost.verdict.passed
    assert "of the model's outputs are NaN or Inf" in lost.verdict.reasons[0]
    (fine,) = compared(model, ["bf16"], loss=lambda model, batch: model(batch).abs().mean())
    assert fine.verdict.passed and 0.0 < fine.verdict.relative < 0.05
    (call,) = calls_of(fine, "")
    assert call.output.elements == 6 * 5 * 2 and call.gradient is not None


def test_a_model_that_returns_nothing_comparable_is_judged_by_its_loss():
    class Wrapped:
        def __init__(self, value):
            self.value = value

    def ratio(model, batch):
        return (model(batch).value - 1.0).abs().mean() * 1e3

    model = Body(lambda self, x: Wrapped(torch.exp(self.layer(x) * 0.0 + 1e-3)), layer=Lossless())
    (found,) = compared(model, ["bf16"], loss=ratio)
    (reason,) = found.verdict.reasons
    assert reason.startswith("the model returned nothing to compare, and the loss is ")


class Lossless(nn.Linear):
    """A layer whose outputs do not matter."""

    def __init__(self):
        super().__init__(8, 8)
