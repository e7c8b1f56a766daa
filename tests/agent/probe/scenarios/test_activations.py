"""Outputs of modules are measured in the first forward pass of sampled steps, and in no other."""

import copy
import io
import pickle
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.probe.instruments.activation_modules import COMPILED, output_row
from mp_agent.records.columns import ACTIVATIONS, GRADIENTS
from tests.agent.probe.rings import RingContents


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.activation = nn.ReLU()
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.activation(self.inner(inputs)))
        return outputs


def train(
    model: nn.Module,
    steps: int,
    *,
    between: Callable[[int], None] = lambda step: None,
    micro_batches: int = 1,
) -> list[torch.Tensor]:
    """Train, and return the inputs of each micro-batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = []
    for step in range(1, steps + 1):
        for _ in range(micro_batches):
            inputs.append(torch.randn(5, 4))
            model(inputs[-1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return inputs


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def tables(contents: RingContents) -> dict[int, dict[str, dict[str, float]]]:
    """The rows of activations by step, layer and column."""
    names = [layer.name for layer in contents.schema.layers]
    found: dict[int, dict[str, dict[str, float]]] = {}
    for table in contents.layers:
        if ACTIVATIONS.name in table.families:
            rows = table.families[ACTIVATIONS.name].tolist()
            found[table.sequence] = {
                name: dict(zip(ACTIVATIONS.names, row, strict=True))
                for name, row in zip(names, rows, strict=True)
                if row[0] == row[0]
            }
    return found


def test_nothing_is_hooked_unless_asked(watch):
    model = Model()
    watched = watch()
    train(model, 2, between=lambda step: assert_(hooks_on(model) == 0))

    schema = watched.read().schema
    assert not any(share.family for share in schema.shares)
    assert not schema.columns(ACTIVATIONS.name), "they would take room in every record"


def assert_(condition: bool) -> None:
    assert condition


def test_rows_of_every_module_are_those_of_its_outputs(watch):
    torch.manual_seed(0)
    model = Model()
    watched = watch(measure_activations=True)
    copies: list[nn.Module] = []
    inputs = train(model, 10, between=lambda step: copies.append(copy.deepcopy(model)))

    contents = watched.read()
    found = tables(contents)
    assert sorted(found) == [2, 10], "the first step after the model is known, then as scheduled"
    with torch.no_grad():
        weights = copies[8]  # as the ninth step left them
        assert isinstance(weights, Model)
        inner = weights.inner(inputs[9])
        hidden = inner.relu()
        outputs = {"inner": inner, "activation": hidden, "head": weights.head(hidden)}
    assert found[10].keys() == outputs.keys(), "a module that is not called has no row"
    for name, output in outputs.items():
        expected = dict(zip(ACTIVATIONS.names, output_row(output, 0, inf).tolist(), strict=True))
        assert found[10][name] == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_the_steps_record_has_all_modules_together(watch):
    model = Model()
    watched = watch(measure_activations=True)
    train(model, 3)

    contents = watched.read()
    share = [share.family for share in contents.schema.shares].index(ACTIVATIONS.name)
    assert [ACTIVATIONS.name in record.families for record in contents.records] == [
        False,
        True,
        False,
    ]
    row = contents.records[1].families[ACTIVATIONS.name][share].tolist()
    layers = tables(contents)[2].values()
    assert row[0] == sum(layer["elements"] for layer in layers) == 5 * (8 + 8 + 2)
    assert row[3] == max(layer["abs_max"] for layer in layers)
    gradients = contents.records[1].families[GRADIENTS.name]
    assert len(gradients) == len(contents.schema.shares)
    assert gradients[share].tolist() == pytest.approx([nan] * gradients.shape[1], nan_ok=True)


def test_modules_are_hooked_for_one_forward_pass_only(watch):
    model = Model()
    watch(measure_activations=True)
    hooked = []
    train(model, 11, between=lambda step: hooked.append(hooks_on(model) > 0))

    assert [step for step, each in enumerate(hooked, 1) if each] == [1, 9]


def test_of_several_micro_batches_the_first_is_measured(watch):
    model = Model()
    watched = watch(measure_activations=True)
    train(model, 2, micro_batches=3)

    assert tables(watched.read())[2]["head"]["elements"] == 5 * 2


def test_an_evaluation_in_between_is_left_out(watch):
    model = Model()
    watched = watch(measure_activations=True)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.full((50, 4), 1e6))
        model.train()

    train(model, 2, between=evaluate)

    assert tables(watched.read())[2]["head"]["elements"] == 5 * 2


def test_the_step_after_an_evaluation_is_measured_where_modes_come_back_without_a_call(watch):
    model = Model()
    watched = watch(measure_activations=True)

    def evaluate(step: int) -> None:
        modes = {module: module.training for module in model.modules()}
        model.eval()
        with torch.no_grad():
            model(torch.full((50, 4), 1e6))
        for module, training in modes.items():
            module.training = training

    train(model, 2, between=evaluate)

    assert tables(watched.read())[2]["head"]["elements"] == 5 * 2


def test_recomputation_in_backward_counts_once(watch):
    class Recomputing(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.inner, inputs, use_reentrant=False)
            outputs: torch.Tensor = self.head(hidden)
            return outputs

    watched = watch(measure_activations=True)
    train(Recomputing(), 2)

    assert tables(watched.read())[2]["inner"]["elements"] == 5 * 8


def test_the_first_nonfinite_output_is_known_by_its_call(watch):
    model = Model()
    watched = watch(measure_activations=True)

    def spoil(step: int) -> None:
        with torch.no_grad():
            model.inner.bias.fill_(nan)

    train(model, 2, between=spoil)

    rows = tables(watched.read())[2]
    assert {name: row["nonfinite_call"] for name, row in rows.items()} == {
        "inner": 0.0,
        "activation": 1.0,
        "head": 2.0,
    }
    assert rows["inner"]["nan_elements"] == 40.0


def test_trouble_is_looked_into_on_the_step_after(watch):
    model = Model()
    watched = watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    healthy = copy.deepcopy(model.state_dict())
    for step in range(1, 8):
        loss = model(torch.randn(5, 4)).square().mean()
        (loss * (nan if step == 4 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(healthy)

    assert sorted(tables(watched.read())) == [2, 5]


def test_outputs_that_are_no_tensor_are_searched_for_tensors(watch):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs, _ = self.lstm(inputs.unsqueeze(1))
            result: torch.Tensor = outputs
            return result

    watched = watch(measure_activations=True)
    train(Recurrent(), 2)

    assert tables(watched.read())[2]["lstm"]["elements"] == 3 * (5 * 3), "outputs, h and c"


def test_copies_of_a_hooked_model_have_nothing_of_the_probe(watch):
    model = Model()
    watch(measure_activations=True)
    train(model, 1)
    assert hooks_on(model) > 0

    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for made in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        inputs = torch.randn(3, 4)
        torch.testing.assert_close(made(inputs), model(inputs))
        assert b"mp_agent" not in pickle.dumps(made)


def test_detaching_leaves_no_hook(watch):
    model = Model()
    watched = watch(measure_activations=True)
    train(model, 1)
    assert hooks_on(model) > 0

    watched.probe.detach()
    assert hooks_on(model) == 0


def test_training_is_the_same_to_the_bit(watch):
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Model()
        train(model, 3)
        return [parameter.detach() for parameter in model.parameters()]

    without = trained()
    watch(measure_activations=True)
    for before, after in zip(without, trained(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.slow
def test_a_compiled_model_is_reported_and_compiles_alike(watch):
    dynamo = pytest.importorskip("torch._dynamo")
    testing = pytest.importorskip("torch._dynamo.testing")

    def count(kind: str) -> tuple[int, int]:
        dynamo.reset()
        dynamo.utils.counters.clear()
        graphs = testing.CompileCounter()
        model = Model()
        if kind == "model":
            optimized: Any = torch.compile(model, backend=graphs)
            train(optimized, 3)
        else:
            # A new shape on a step on which modules are hooked compiles once more.
            optimizer = torch.optim.SGD(model.parameters())
            forward = torch.compile(lambda inputs: model(inputs).sum(), backend=graphs)
            for batch in (5, 6, 7):
                forward(torch.randn(batch, 4)).backward()
                optimizer.step()
        breaks = sum(dynamo.utils.counters["graph_break"].values())
        dynamo.reset()
        return graphs.frame_count, breaks

    without = [count("model"), count("function")]
    watched = watch(measure_activations=True)
    assert [count("model"), count("function")] == without
    assert COMPILED in watched.state().unsupported
