"""The rows of routers; what holds for every family is in `test_families`."""

from functools import partial
from math import log, nan

import pytest
import torch
from torch import nn

from mp_agent.records.columns import ROUTERS
from tests.agent.probe.scenarios import training


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


train = partial(training.train, inputs_of=lambda step: torch.randn(16, 8))


def test_the_row_of_a_router_is_that_of_its_logits(watch):
    torch.manual_seed(0)
    model = Model()
    watched = watch(measure_routers=True)
    inputs = train(model, 10)

    found = watched.read().rows(ROUTERS)
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
        },
        rel=1e-5,
    )


def test_a_router_that_a_setting_names_is_measured_by_its_logits(watch):
    model = Model()
    watched = watch(routers={"*gate": 1})
    inputs = train(model, 2)

    found = watched.read().rows(ROUTERS)[2]
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


def test_a_router_that_is_called_twice_has_the_tokens_of_both_calls(watch):
    class Shared(Model):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = super().forward(inputs[:4]).mean() + super().forward(inputs)
            return outputs

    watched = watch(measure_routers=True)
    train(Shared(), 2)
    row = watched.read().rows(ROUTERS)[2]["router"]
    assert row["tokens"] == row["entropy_tokens"] == 20.0
    assert row["experts"] == 8.0


def test_tokens_without_finite_logits_are_counted(watch):
    model = Model()
    watched = watch(measure_routers=True)

    def spoil(step: int) -> None:
        with torch.no_grad():
            model.router.weight[1, 1] = nan

    train(model, 2, between=spoil)
    row = watched.read().rows(ROUTERS)[2]["router"]
    assert row["nonfinite_tokens"] == 16.0 and row["entropy_tokens"] == 0.0
