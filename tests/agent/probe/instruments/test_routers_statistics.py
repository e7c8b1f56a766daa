"""The row of a router against a reference in float64, token by token."""

from collections.abc import Sequence
from math import exp, inf, isfinite, isnan, log, nan

import pytest
import torch

from mp_agent.probe.instruments import routers
from mp_agent.probe.instruments.router_gates import Routing, load_of
from mp_agent.probe.instruments.routers import router_row
from mp_agent.records.columns import ROUTERS
from tests.subtests import each


def reference(
    logits: Sequence[Sequence[float]], chosen: Sequence[Sequence[int]]
) -> dict[str, float]:
    """The columns of a router that has logits; those that are absent are left out."""
    experts = len(logits[0])
    entropies, magnitudes, nonfinite = [], [], 0
    for row in logits:
        magnitudes += [abs(value) for value in row if isfinite(value)]
        if any(isnan(value) or value == inf for value in row) or max(row) == -inf:
            nonfinite += 1
            continue
        weights = [exp(value - max(row)) for value in row]
        shares = [weight / sum(weights) for weight in weights]
        entropies.append(-sum(share * log(share) for share in shares if share > 0.0))
    load = [sum(expert in row for row in chosen) for expert in range(experts)]
    found = {
        "tokens": float(len(logits)),
        "nonfinite_tokens": float(nonfinite),
        "load_max": max(load) * experts / sum(load),
        "experts": float(experts),
        "unused_experts": float(load.count(0)),
    }
    if experts > 1:
        found["entropy_tokens"] = float(len(entropies))
        found["entropy_sum"] = sum(entropies) / log(experts)
    if magnitudes:
        found["logit_abs_max"] = max(magnitudes)
    return found


def measured(routing: Routing) -> dict[str, float]:
    row = router_row(routing)
    assert row is not None and row.dtype is torch.float64
    columns = zip(ROUTERS.names, row.tolist(), strict=True)
    return {name: value for name, value in columns if not isnan(value)}


def routing_of(logits: torch.Tensor, chosen: torch.Tensor) -> Routing:
    load = load_of(chosen, logits.shape[-1])
    return Routing(tokens=len(logits), load_E=load, logits_TE=logits)


@each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@each(("tokens", "experts", "top_k"), [(50, 8, 2), (7, 64, 6), (1, 4, 1)])
def test_each_column_is_that_of_the_reference(tokens, experts, top_k, dtype):
    torch.manual_seed(tokens)
    logits = (3 * torch.randn(tokens, experts)).to(dtype)
    chosen = logits.topk(top_k, dim=-1).indices
    expected = reference(logits.double().tolist(), chosen.tolist())
    assert measured(routing_of(logits, chosen)) == pytest.approx(expected, rel=1e-5)


ODD = {
    "NaN": [[nan, 1.0, 2.0], [0.5, 0.0, -1.0]],
    "Inf": [[inf, 1.0, 2.0], [0.5, 0.0, -1.0]],
    "a masked expert": [[-inf, 1.0, 2.0], [0.5, 0.0, -1.0]],
    "all experts masked": [[-inf, -inf, -inf], [0.5, 0.0, -1.0]],
    "nothing finite": [[nan, nan, nan]],
    "zeros": [[0.0, -0.0, 0.0], [-0.0, -0.0, -0.0]],
    "huge": [[3e38, -3e38, 0.0], [1e30, 1e30, 1e30]],
    "subnormal": [[1e-45, 0.0, -1e-45], [1.0, 1.0, 1.0]],
    "one token": [[1.0, 2.0, 5.0]],
    "one expert": [[1.5], [2.0]],
}


@each("logits", ODD.values())
def test_at_the_edges_too(logits):
    values = torch.tensor(logits)
    chosen = values.topk(1, dim=-1).indices
    expected = reference(values.double().tolist(), chosen.tolist())
    assert measured(routing_of(values, chosen)) == pytest.approx(expected, rel=1e-5)


def test_without_tokens_there_is_no_row():
    assert router_row(routing_of(torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int64))) is None


def test_many_tokens_are_measured_in_chunks_to_the_same_row(monkeypatch):
    logits = torch.randn(100, 4)
    logits[50, 1] = nan
    chosen = logits.topk(2, dim=-1).indices
    whole = measured(routing_of(logits, chosen))
    monkeypatch.setattr(routers, "_CHUNK_ELEMENTS", 4 * 7)
    assert measured(routing_of(logits, chosen)) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_known_as_such(dtype):
    torch.manual_seed(0)
    logits = torch.randn(40, 8)
    chosen = logits.topk(2, dim=-1).indices
    expected = measured(routing_of(logits, chosen))
    del expected["logit_abs_max"]  # is not to be seen
    found = measured(routing_of(logits.softmax(dim=-1).to(dtype), chosen))
    assert found == pytest.approx(expected, rel=1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_a_router_that_shows_no_logits_has_its_load():
    load = torch.tensor([5, 0, 1, 2])
    assert measured(Routing(tokens=4, load_E=load, logits_TE=None)) == {
        "tokens": 4.0,
        "load_max": 2.5,
        "experts": 4.0,
        "unused_experts": 1.0,
    }


def test_what_was_dropped_is_there_where_it_is_known():
    load = torch.tensor([5, 0, 1, 2])
    found = measured(
        Routing(tokens=4, load_E=load, logits_TE=None, choices=load.sum(), dropped=torch.tensor(0))
    )
    assert found["limited_choices"] == 8.0 and found["dropped_choices"] == 0.0


def test_indices_beyond_the_experts_are_left_out():
    assert load_of(torch.tensor([[0, 7], [-1, 1], [1, 0]]), 3).tolist() == [2, 2, 0]
