"""Which modules are routers, and what is read from their outputs."""

import types
from typing import Any

import pytest
import torch
from torch import nn

from mp_agent.probe.instruments.router_gates import (
    COMPILED,
    Gates,
    Routing,
    read_of_class,
    read_top_k,
)
from tests.subtests import each

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 0.0, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0]])
CHOSEN = LOGITS.topk(2, dim=-1)
LOAD = [1, 2, 0, 3]


class TokenRouter(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def read(output: object, top_k: int = 2, counts: tuple[int, ...] = (4,)) -> Routing | None:
    return read_top_k(top_k, counts)(nn.Identity(), (), output)


OUTPUTS: dict[str, object] = {
    "logits": LOGITS,
    "logits, weights and choice": (LOGITS, CHOSEN.values, CHOSEN.indices),
    "choice, weights and logits": (CHOSEN.indices.int(), CHOSEN.values, LOGITS),
    "scores and logits": (LOGITS.sigmoid(), LOGITS),
    "tokens in batches": (
        LOGITS.unsqueeze(0),
        CHOSEN.values.unsqueeze(0),
        CHOSEN.indices.unsqueeze(0),
    ),
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_with_logits_has_load_and_logits(output):
    found = read(output)
    assert found is not None and found.tokens == 3
    assert found.load_E.tolist() == LOAD
    assert found.logits_TE is not None and torch.equal(found.logits_TE, LOGITS)
    assert found.dropped is None and found.choices is None


def test_an_output_of_choices_alone_has_their_load():
    found = read((CHOSEN.indices, CHOSEN.values, torch.tensor(0.1)))
    assert found is not None and found.logits_TE is None
    assert found.load_E.tolist() == LOAD


def test_all_experts_may_be_chosen():
    top = LOGITS.topk(4, dim=-1)
    found = read((LOGITS, top.values, top.indices), top_k=4)
    assert found is not None and found.load_E.tolist() == [3, 3, 3, 3]
    assert found.logits_TE is not None and torch.equal(found.logits_TE, LOGITS)


UNREADABLE: dict[str, object] = {
    "nothing": None,
    "a number": torch.tensor(1.0),
    "other shapes": torch.randn(3, 5),
    "choices among other states": (torch.randn(3, 5), CHOSEN.values, CHOSEN.indices),
    "text": "logits",
    "a sparse tensor": LOGITS.to_sparse(),
    "choices of other tokens": (LOGITS, CHOSEN.values, CHOSEN.indices[:2]),
}


@each("output", UNREADABLE.values())
def test_what_is_not_understood_is_not_read(output):
    assert read(output) is None


def test_more_experts_than_there_are_cannot_be_chosen():
    assert read(LOGITS, top_k=5, counts=()) is None


@pytest.mark.parametrize("count", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_a_class_named_router_is_one_that_says_how_many_it_chooses_of_how_many(count):
    assert read_of_class(TokenRouter(top_k=2, **{count: 4})) is not None


@each(
    "module",
    [
        TokenRouter(),
        TokenRouter(top_k=2),
        TokenRouter(num_experts=4),
        TokenRouter(top_k=None, num_experts=4),
        TokenRouter(top_k=2, num_experts=[4, 8]),
        TokenRouter(top_k=0, num_experts=4),
        nn.Linear(4, 4),
    ],
)
def test_any_other_module_is_none(module):
    assert read_of_class(module) is None


def model() -> nn.Module:
    block = nn.ModuleDict({"gate": nn.Linear(4, 4), "router": TokenRouter(top_k=1, num_experts=4)})
    return nn.ModuleDict(
        {"blocks": nn.ModuleList([block, nn.ModuleDict({"gate": nn.Linear(4, 4)})])}
    )


def test_a_setting_names_routers_by_patterns_of_their_names():
    root = model()
    found = Gates(root, {"*.gate": 2})
    assert found.names == ("blocks.0.gate", "blocks.0.router", "blocks.1.gate")
    assert [gate.pattern for gate in found.gates] == ["*.gate", "", "*.gate"]
    assert found.not_covered == ()
    assert found.is_of(root) and not found.is_of(model())
    assert Gates(root, {}).names == ("blocks.0.router",)


def test_a_pattern_that_fits_no_module_is_reported():
    assert Gates(model(), {"*.gate": 2, "*.gates": 2}).not_covered == (
        "routers=*.gates: there is no such module",
    )


def test_routers_within_compiled_modules_are_reported_and_left_alone():
    root = model()
    compiled: Any = root.get_submodule("blocks.0")
    compiled._compiled_call_impl = types.SimpleNamespace()
    found = Gates(root, {"*.gate": 2})
    assert found.names == ("blocks.1.gate",)
    assert found.not_covered == (COMPILED,)


def test_no_router_is_kept_alive():
    found = Gates(model(), {"*.gate": 2})
    assert [gate.module() for gate in found.gates] == [None] * 3
