"""The rows of outputs of modules; what holds for every family is in `test_families`."""

import copy
from functools import partial
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.probe.instruments.activation_modules import output_row
from mp_agent.probe.instruments.activations import NEVER_CALLED, NEVER_IN_TRAINING
from mp_agent.records.columns import ACTIVATIONS, GRADIENTS, by_name
from tests.agent.probe.scenarios import training


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


train = partial(training.train, inputs_of=lambda step: torch.randn(5, 4), lr=0.1)


def test_rows_of_every_module_are_those_of_its_outputs(watch):
    torch.manual_seed(0)
    model = Model()
    watched = watch(measure_activations=True)
    copies: list[nn.Module] = []
    inputs = train(model, 10, between=lambda step: copies.append(copy.deepcopy(model)))

    contents = watched.read()
    found = contents.rows(ACTIVATIONS)
    assert sorted(found) == [2, 10], "the first step after the model is known, then as scheduled"
    with torch.no_grad():
        weights = copies[8]  # as the ninth step left them
        assert isinstance(weights, Model)
        inner = weights.inner(inputs[9])
        hidden = inner.relu()
        outputs = {"inner": inner, "activation": hidden, "head": weights.head(hidden)}
    assert found[10].keys() == outputs.keys(), "a module that is not called has no row"
    for name, output in outputs.items():
        expected = by_name(ACTIVATIONS.names, output_row(output, 0, inf).tolist())
        assert found[10][name] == pytest.approx(expected, rel=1e-6)


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
    layers = contents.rows(ACTIVATIONS)[2].values()
    assert row[0] == sum(layer["elements"] for layer in layers) == 5 * (8 + 8 + 2)
    assert row[3] == max(layer["abs_max"] for layer in layers)
    gradients = contents.records[1].families[GRADIENTS.name]
    assert len(gradients) == len(contents.schema.shares)
    assert gradients[share].tolist() == pytest.approx([nan] * gradients.shape[1], nan_ok=True)


def test_recomputation_in_backward_counts_once(watch):
    class Recomputing(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.inner, inputs, use_reentrant=False)
            outputs: torch.Tensor = self.head(hidden)
            return outputs

    watched = watch(measure_activations=True)
    train(Recomputing(), 2)

    assert watched.read().rows(ACTIVATIONS)[2]["inner"]["elements"] == 5 * 8


def test_the_first_nonfinite_output_is_known_by_its_call(watch):
    model = Model()
    watched = watch(measure_activations=True)

    def spoil(step: int) -> None:
        with torch.no_grad():
            model.inner.bias.fill_(nan)

    train(model, 2, between=spoil)

    rows = watched.read().rows(ACTIVATIONS)[2]
    assert {name: row["nonfinite_call"] for name, row in rows.items()} == {
        "inner": 0.0,
        "activation": 1.0,
        "head": 2.0,
    }
    assert rows["inner"]["nan_elements"] == 40.0


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

    row = watched.read().rows(ACTIVATIONS)[2]["lstm"]
    assert row["elements"] == 3 * (5 * 3), "outputs, h and c"


@pytest.mark.parametrize(("way", "said"), [("copy", NEVER_CALLED), ("eval", NEVER_IN_TRAINING)])
def test_modules_that_no_step_calls_in_training_are_named_after_three_samples(watch, way, said):
    model, watched = Model(), watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks, reported = [], []
    for _ in range(21):
        if way == "eval":
            outputs = model.eval()(torch.randn(5, 4))
        else:  # as a functional copy of it computes
            hidden = torch.nn.functional.linear(torch.randn(5, 4), model.inner.weight)
            outputs = torch.nn.functional.linear(hidden, model.head.weight)
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        hooks.append(training.hooks_on(model))
        reported.append(watched.state().unsupported)
    assert [step for step, count in enumerate(hooks, 1) if count] == [1, 9, 19]
    assert [step for step, each in enumerate(reported, 1) if said in each] == [20, 21]
    assert reported[-1] == (said,)
    assert not watched.read(one_schema=False).rows(ACTIVATIONS)


def test_a_call_ends_a_row_of_samples_without_any(watch):
    model, watched = Model(), watch(measure_activations=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 41):
        if step == 20:
            outputs = model(torch.randn(5, 4))
        else:
            outputs = torch.nn.functional.linear(torch.randn(5, 8), model.head.weight)
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(watched.read(one_schema=False).rows(ACTIVATIONS)) == [20]
    assert NEVER_CALLED not in watched.state().unsupported
