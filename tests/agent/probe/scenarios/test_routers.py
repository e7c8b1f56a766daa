"""Routers are measured in the first forward pass of sampled steps, and in no other."""

import copy
import pickle
from collections.abc import Callable
from math import log, nan

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mp_agent.records.columns import ROUTERS
from tests.agent.probe.rings import RingContents


class TokenRouter(nn.Module):
    """As those of transformers: logits, weights and choice."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = 2, 4
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(inputs, self.weight)
        values, indices = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, values, indices


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = TokenRouter()
        self.gate = nn.Linear(8, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        _, values, _ = self.router(inputs)
        own = self.gate(inputs).softmax(-1).sum(-1, keepdim=True)
        outputs: torch.Tensor = self.head(inputs) * values.sum(-1, keepdim=True) * own
        return outputs


def train(
    model: nn.Module, steps: int, between: Callable[[int], None] = lambda step: None
) -> list[torch.Tensor]:
    """Train without changing the weights, and return the inputs of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = []
    for step in range(1, steps + 1):
        inputs.append(torch.randn(16, 8))
        model(inputs[-1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return inputs


def tables(contents: RingContents) -> dict[int, dict[str, dict[str, float]]]:
    """The rows of routers by step, layer and column."""
    names = [layer.name for layer in contents.schema.layers]
    found: dict[int, dict[str, dict[str, float]]] = {}
    for table in contents.layers:
        if ROUTERS.name in table.families:
            rows = table.families[ROUTERS.name].tolist()
            found[table.sequence] = {
                name: dict(zip(ROUTERS.names, row, strict=True))
                for name, row in zip(names, rows, strict=True)
                if row[0] == row[0]
            }
    return found


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_nothing_is_measured_unless_asked(watch):
    watched = watch()
    train(Model(), 2)
    schema = watched.read().schema
    assert not schema.columns(ROUTERS.name), "they would take room in every record"


def test_the_row_of_a_router_is_that_of_its_logits(watch):
    torch.manual_seed(0)
    model = Model()
    watched = watch(measure_routers=True)
    inputs = train(model, 10)

    found = tables(watched.read())
    assert sorted(found) == [2, 10] and found[10].keys() == {"router"}
    logits = nn.functional.linear(inputs[9], model.router.weight).detach().double()
    load = torch.bincount(logits.topk(2).indices.flatten(), minlength=4)
    shares = logits.softmax(-1)
    assert found[10]["router"] == pytest.approx(
        {
            "tokens": 16.0,
            "nonfinite_tokens": 0.0,
            "entropy_tokens": 16.0,
            "entropy_sum": float(-(shares * shares.log()).sum()) / log(4),
            "logit_abs_max": float(logits.abs().max()),
            "load_max": float(load.max()) / 8.0,
            "experts": 4.0,
            "unused_experts": float((load == 0).sum()),
            "limited_choices": nan,
            "dropped_choices": nan,
        },
        rel=1e-5,
        nan_ok=True,
    )


def test_a_router_that_a_setting_names_is_measured_by_its_logits(watch):
    model = Model()
    watched = watch(routers={"*gate": 1})
    inputs = train(model, 2)

    found = tables(watched.read())[2]
    assert found.keys() == {"router", "gate"}
    with torch.no_grad():
        load = torch.bincount(model.gate(inputs[1]).argmax(-1), minlength=4)
    assert found["gate"]["load_max"] == float(load.max()) / 4.0


def test_routers_that_cannot_be_read_are_reported_if_a_setting_names_them(watch):
    watched = watch(routers={"head": 2, "*.gates": 2})
    train(Model(), 3)
    unsupported = watched.state().unsupported
    assert "routers=head: its output has no logits of experts" in unsupported
    assert "routers=*.gates: there is no such module" in unsupported


def test_a_model_without_routers_is_trained_in_silence(watch):
    watched = watch(measure_routers=True)
    optimizer_steps = train(nn.Sequential(nn.Linear(8, 1)), 3)
    assert len(optimizer_steps) == 3
    assert not watched.state().unsupported
    assert not watched.read().schema.columns(ROUTERS.name)


def test_routers_are_hooked_for_one_forward_pass_only(watch):
    model = Model()
    watched = watch(measure_routers=True)
    hooked = []
    train(model, 11, between=lambda step: hooked.append(hooks_on(model)))
    assert [step for step, count in enumerate(hooked, 1) if count] == [1, 9]
    assert set(hooked) == {0, 1}, "the router alone"

    watched.probe.detach()
    assert hooks_on(model) == 0


def test_recomputation_in_backward_and_evaluation_do_not_count(watch):
    class Recomputing(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
            return outputs

    model = Recomputing()
    watched = watch(measure_routers=True)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(50, 8))
        model.train()

    train(model, 2, between=evaluate)
    assert tables(watched.read())[2]["router"]["tokens"] == 16.0


def test_a_router_that_is_called_twice_has_the_tokens_of_both_calls(watch):
    class Shared(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = super().forward(inputs[:4]).mean() + super().forward(inputs)
            return outputs

    watched = watch(measure_routers=True)
    train(Shared(), 2)
    row = tables(watched.read())[2]["router"]
    assert row["tokens"] == row["entropy_tokens"] == 20.0
    assert row["experts"] == 8.0


def test_tokens_without_finite_logits_are_counted(watch):
    model = Model()
    watched = watch(measure_routers=True)

    def spoil(step: int) -> None:
        with torch.no_grad():
            model.router.weight[1, 1] = nan

    train(model, 2, between=spoil)
    row = tables(watched.read())[2]["router"]
    assert row["nonfinite_tokens"] == 16.0 and row["entropy_tokens"] == 0.0


def test_copies_of_a_hooked_model_have_nothing_of_the_probe(watch):
    model = Model()
    watch(measure_routers=True)
    train(model, 1)
    assert hooks_on(model) > 0
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        inputs = torch.randn(3, 8)
        torch.testing.assert_close(made(inputs), model(inputs))
        assert b"mp_agent" not in pickle.dumps(made)
