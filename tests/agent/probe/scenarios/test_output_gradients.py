"""Where in backward a NaN or Inf arose, against what full backward hooks say of the same model."""

import gc
import weakref
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.node.accounting.incidents import first_nonfinite_gradient
from mp_agent.probe.instruments.activation_modules import COMPILED
from mp_agent.records.columns import ACTIVATIONS
from mp_agent.records.views import LayerView
from tests.agent.probe.rings import RingContents


class Bad(torch.autograd.Function):
    """The identity, whose gradient is `value` times what it should be."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.value, None


def bad(inputs: torch.Tensor, value: float = nan) -> torch.Tensor:
    found: torch.Tensor = Bad.apply(inputs, value)
    return found


class Layer(nn.Module):
    """A linear layer that may go wrong in backward."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 4)
        self.value = value

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return bad(inputs @ self.weight, self.value)


def place_in(contents: RingContents, sequence: int = 2) -> tuple[str, str] | None:
    views = [
        LayerView(
            name=name,
            values=row,
            judged=True,
            family=ACTIVATIONS.name,
        )
        for name, row in contents.rows(ACTIVATIONS)[sequence].items()
    ]
    found = first_nonfinite_gradient(sequence, views)
    return None if found is None else (found.layer, found.place)


def found_by_the_probe(
    watch: Callable[..., Any], model: nn.Module, *, loss_factor: float = 1.0
) -> tuple[str, str] | None:
    """Train two steps, of which the second is a sampled one, and return what it shows."""
    watched = watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        (model(torch.ones(3, 4)).square().mean() * loss_factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(state)
    return place_in(watched.read())


def found_by_full_hooks(model: nn.Module, loss: Callable[[], torch.Tensor] | None = None) -> str:
    """The first module in backward that got finite gradients and gave others."""
    found: list[str] = []

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, made: Any, got: Any) -> None:
            finite = [
                all(bool(each.isfinite().all()) for each in gradients if each is not None)
                for gradients in (got, made)
            ]
            if finite == [True, False]:
                found.append(name)

        return hook

    handles = [
        module.register_full_backward_hook(hook_of(name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    if loss is None:
        model(torch.ones(3, 4, requires_grad=True)).square().mean().backward()
    else:
        loss().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return found[0] if found else ""


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("where", [1, 3, 5])
def test_the_module_whose_backward_makes_it_is_named(watch, where, value):
    layers: list[nn.Module] = [
        Layer(),
        nn.ReLU(inplace=True),
        Layer(),
        nn.Identity(),
        nn.LayerNorm(4),
        nn.Dropout(0.5),
        Layer(),
    ]
    layers.insert(where, Layer(value))
    model = nn.Sequential(*layers)
    assert found_by_full_hooks_without_in_place(model) == str(where)
    assert found_by_the_probe(watch, model) == (str(where), "within")


def found_by_full_hooks_without_in_place(model: nn.Sequential) -> str:
    """Full backward hooks are not for modules that change their input."""
    for module in model:
        if isinstance(module, nn.ReLU):
            module.inplace = False
    found = found_by_full_hooks(model)
    for module in model:
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return found


@pytest.mark.parametrize("module", [nn.ReLU(inplace=True), nn.Identity(), nn.Dropout(0.0)])
def test_a_module_behind_one_that_returns_its_input_is_distinguished_from_it(watch, module):
    assert found_by_the_probe(watch, nn.Sequential(Layer(), module, Layer(nan))) == ("2", "within")


def test_a_module_in_front_of_one_that_changes_its_input_is_distinguished(watch):
    model = nn.Sequential(Layer(), Layer(nan), nn.ReLU(inplace=True))
    assert found_by_the_probe(watch, model) == ("1", "within")


def test_a_finite_backward_names_nothing(watch):
    assert found_by_the_probe(watch, nn.Sequential(Layer(), nn.ReLU(), Layer())) is None


@pytest.mark.parametrize("factor", [nan, inf])
def test_what_comes_from_the_loss_arose_after_the_last_module(watch, factor):
    model = nn.Sequential(Layer(), Layer())
    assert found_by_the_probe(watch, model, loss_factor=factor) == ("1", "after")


class Residual(nn.Module):
    """`within` may be bad in a module of the branch, in a function in it, or in the sum."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first = Layer()
        self.norm = nn.LayerNorm(4)
        self.up = Layer(nan if where == "up" else 1.0)
        self.down = Layer(nan if where == "down" else 1.0)
        self.head = Layer(nan if where == "head" else 1.0)
        self.where = where

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        hidden = self.up(self.norm(stream))
        hidden = bad(hidden) if self.where == "function" else hidden.tanh()
        stream = stream + self.down(hidden)
        stream = bad(stream) if self.where == "sum" else stream
        outputs: torch.Tensor = self.head(stream)
        return outputs


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("up", ("up", "within")),
        ("down", ("down", "within")),
        ("head", ("head", "within")),
        ("function", ("up", "after")),
        ("sum", ("down", "after")),
    ],
)
def test_residual_branches_and_functions_between_modules(watch, where, expected):
    model = Residual(where)
    if expected[1] == "within":
        assert found_by_full_hooks(model) == expected[0]
    assert found_by_the_probe(watch, model) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(watch, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Layer()
            self.block = nn.Sequential(Layer(), Layer(nan), Layer())
            self.head = Layer()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.block, self.first(inputs), use_reentrant=reentrant)
            outputs: torch.Tensor = self.head(hidden)
            return outputs

    # Modules within reentrant checkpointing run without autograd: it arose after what is before.
    expected = ("first", "after") if reentrant else ("block.1", "within")
    assert found_by_the_probe(watch, Checkpointed()) == expected


def test_a_module_that_is_called_twice_and_returns_several_tensors(watch):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, inputs: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
            return {"both": (inputs @ self.weight, (inputs + 1) @ self.weight)}

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()
            self.shared = Layer()
            self.bad = Layer(nan)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            left, right = self.pair(self.shared(inputs))["both"]
            outputs: torch.Tensor = self.shared(self.bad(left)) + right
            return outputs

    assert found_by_the_probe(watch, Twice()) == ("bad", "within")


def test_a_module_that_reads_its_own_output_is_named(watch):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Layer()
            self.kept = nn.Identity()
            self.last = Layer()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = inputs
            for call in range(3):
                self.cell.value = nan if call == 1 else 1.0
                hidden = self.kept(self.cell(hidden))
            outputs: torch.Tensor = self.last(hidden)
            return outputs

    assert found_by_the_probe(watch, Recurrent()) == ("cell", "within")


def test_of_several_modules_with_the_same_input_the_first_is_named(watch):
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.first = Layer()
            self.query, self.key, self.value = Layer(), Layer(), Layer(nan)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(self.first(inputs))
            outputs: torch.Tensor = self.query(hidden) + self.key(hidden) + self.value(hidden)
            return outputs

    assert found_by_the_probe(watch, Projections()) == ("query", "within")


def test_a_gradient_that_overflows_fp16_is_named_where_the_scaler_skips_the_step(watch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for module, gain in zip(model, (1.0, 1.0, 8.0, 1.0), strict=True):
        with torch.no_grad():
            module.weight.copy_(gain * torch.eye(4))  # type: ignore[operator]
    scale = 2.0**14

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            outputs: torch.Tensor = model(torch.ones(3, 4, requires_grad=True))
            return outputs.float().sum()

    assert found_by_full_hooks(model, lambda: loss() * scale / 2) == "2"
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    watched = watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    contents = watched.read()
    skipped = contents.schema.step_columns.index("skipped")
    assert [record.values[skipped] for record in contents.records] == [1.0, 1.0]
    assert place_in(contents) == ("2", "within")


def test_of_several_micro_batches_the_first_is_looked_at(watch):
    model = nn.Sequential(Layer(), Layer(), Layer())
    watched = watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(2):
        for part in range(2):
            assert isinstance(model[1], Layer)
            model[1].value = nan if (step, part) == (1, 1) else 1.0
            model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert place_in(watched.read()) is None


def test_tensors_are_left_without_hooks_and_are_not_kept_alive(watch):
    model = nn.Sequential(Layer(), Layer())
    watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept: list[torch.Tensor] = []
    handle = model[1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    for step in range(2):
        outputs = model(torch.ones(3, 4))
        assert bool(kept[-1]._backward_hooks) == (step == 1)
        outputs.sum().backward()
        assert not kept[-1]._backward_hooks
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    references = [weakref.ref(each) for each in kept]
    kept.clear()
    del outputs
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_another_backward_through_the_same_graph_changes_nothing(watch):
    model = nn.Sequential(Layer(), Layer(nan), Layer())
    watched = watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weights = [each.detach().clone() for each in model.parameters()]
    for _ in range(2):
        loss = model(torch.ones(3, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(value)
    assert place_in(watched.read()) == ("1", "within")


@pytest.mark.slow
def test_a_compiled_module_is_not_looked_into_and_compiles_once(watch):
    dynamo = pytest.importorskip("torch._dynamo")
    testing = pytest.importorskip("torch._dynamo.testing")
    dynamo.reset()
    graphs = testing.CompileCounterWithBackend("aot_eager")
    block = nn.Sequential(Layer(), nn.Tanh())
    bad_layer = Layer(nan)
    model = nn.Sequential(Layer(), block, bad_layer, Layer())
    block.compile(backend=graphs)
    watched = watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        bad_layer.value = nan if step == 1 else 1.0
        model(torch.ones(3, 4)).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
    dynamo.reset()
    assert COMPILED in watched.state().unsupported
    assert graphs.frame_count == 1
    assert place_in(watched.read()) == ("2", "within")
