"""Rows of attention logits against float64, with what `scaled_dot_product_attention` masks."""

from math import inf, isfinite, nan, sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mp_agent.probe.instruments.attention_logits import attention_row, weights_row
from mp_agent.records.columns import ATTENTION
from tests.agent.probe.instruments.odd_tensors import random
from tests.subtests import each


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> list[float]:
    """The columns of `ATTENTION`, over all heads and positions, one logit after the other."""
    heads, length, size = query.shape[-3], query.shape[-2], query.shape[-1]
    group = heads // key.shape[-3]
    elements, nonfinite, largest = 0, 0, nan
    q = query.double().reshape(-1, heads, length, size).tolist()
    k = key.double().reshape(len(q), -1, key.shape[-2], size).tolist()
    bias = None
    if mask is not None:
        bias = mask.expand(len(q), heads, length, key.shape[-2]).tolist()
    for b, of_batch in enumerate(q):
        for h, of_head in enumerate(of_batch):
            for i, row in enumerate(of_head):
                for j, column in enumerate(k[b][h // group]):
                    added = 0.0 if bias is None else bias[b][h][i][j]
                    if added is False or added == -inf or (is_causal and j > i):
                        continue
                    product = sum(x * y for x, y in zip(row, column, strict=True))
                    logit = product * (1 / sqrt(size) if scale is None else scale)
                    logit += 0.0 if added is True else added
                    elements += 1
                    if not isfinite(logit):
                        nonfinite += 1
                    elif not logit <= largest:
                        largest = logit
    return [float(elements), float(nonfinite), largest]


def _spoiled(value: float) -> torch.Tensor:
    query = random(1, 2, 5, 4)
    query[0, 1, 3, 2] = value
    return query


_SOME = torch.tensor([[True, False, True, True, False]])

CASES: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {
    "several heads": (random(2, 4, 6, 8), random(2, 4, 6, 8, seed=1), {}),
    "float64": (
        random(1, 2, 5, 4, dtype=torch.float64),
        random(1, 2, 5, 4, seed=1, dtype=torch.float64),
        {},
    ),
    "float16": (
        random(1, 2, 5, 4, dtype=torch.float16),
        random(1, 2, 5, 4, seed=1, dtype=torch.float16),
        {},
    ),
    "bfloat16": (
        random(1, 2, 5, 4, dtype=torch.bfloat16),
        random(1, 2, 5, 4, seed=1, dtype=torch.bfloat16),
        {},
    ),
    "float16 beyond its own largest number": (
        torch.full((1, 1, 2, 4), 3e4, dtype=torch.float16),
        torch.full((1, 1, 2, 4), 3e4, dtype=torch.float16),
        {},
    ),
    "grouped queries": (random(1, 4, 5, 4), random(1, 2, 6, 4, seed=1), {}),
    "one head for all": (random(2, 4, 3, 4), random(2, 1, 3, 4, seed=1), {}),
    "one head, one position, one number": (random(1, 1, 1, 1), random(1, 1, 1, 1, seed=1), {}),
    "no batch": (random(3, 5, 4), random(3, 5, 4, seed=1), {}),
    "causal": (random(1, 2, 6, 4), random(1, 2, 6, 4, seed=1), {"is_causal": True}),
    "causal with more keys": (
        random(1, 2, 3, 4),
        random(1, 2, 7, 4, seed=1),
        {"is_causal": True},
    ),
    "a scale": (random(1, 2, 5, 4), random(1, 2, 5, 4, seed=1), {"scale": 3.5}),
    "masked keys": (random(1, 2, 5, 4), random(1, 2, 5, 4, seed=1), {"mask": _SOME}),
    "all masked": (
        random(1, 2, 5, 4),
        random(1, 2, 5, 4, seed=1),
        {"mask": torch.zeros(5, 5, dtype=torch.bool)},
    ),
    "a bias": (random(1, 2, 5, 4), random(1, 2, 5, 4, seed=1), {"mask": random(2, 5, 5)}),
    "a bias of -Inf": (
        random(1, 2, 5, 4),
        random(1, 2, 5, 4, seed=1),
        {"mask": torch.zeros(5, 5).masked_fill(~_SOME, -inf)},
    ),
    "NaN": (_spoiled(nan), random(1, 2, 5, 4, seed=1), {}),
    "Inf": (_spoiled(inf), random(1, 2, 5, 4, seed=1), {}),
    "all NaN": (torch.full((1, 1, 3, 2), nan), random(1, 1, 3, 2), {}),
    "NaN behind a mask": (random(1, 2, 5, 4, seed=1), _spoiled(nan), {"is_causal": True}),
    "subnormal and zeros": (torch.full((1, 1, 2, 2), 1e-40), torch.zeros(1, 1, 2, 2), {}),
    "all negative": (-torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), {}),
}


@each("name", CASES)
def test_a_row_agrees_with_float64_where_all_is_looked_at(name):
    query, key, options = CASES[name]
    found = attention_row(query, key, **options)
    assert found is not None and found.dtype is torch.float64
    expected = reference(query, key, **options)
    if name == "float16 beyond its own largest number":
        assert expected[2] > 65_504
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-30, nan_ok=True)


@pytest.mark.parametrize("name", ["several heads", "causal", "masked keys", "a bias of -Inf"])
def test_logits_as_a_tensor_give_the_same_row(name):
    query, key, options = CASES[name]
    logits = query @ key.mT / sqrt(query.shape[-1])
    if options.get("is_causal"):
        logits = logits.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -inf)
    if (mask := options.get("mask")) is not None:
        lowest = torch.finfo(torch.float32).min
        logits = logits.masked_fill(~_SOME, lowest) if mask.dtype is torch.bool else logits + mask
    found = weights_row(logits)
    assert found is not None
    assert found.tolist() == pytest.approx(reference(query, key, **options), rel=1e-5)


def test_the_reference_is_what_torch_computes():
    """A softmax of large logits picks the key with the largest."""
    query, key, options = CASES["grouped queries"]
    value = torch.eye(6).expand(1, 2, 6, 6)
    picked = F.scaled_dot_product_attention(query * 1e3, key, value, enable_gqa=True).argmax(-1)
    logits = query @ key.repeat_interleave(2, dim=1).mT / 2
    assert picked.equal(logits.argmax(-1))
    assert reference(query, key, **options)[2] == pytest.approx(float(logits.max()), rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (1, 2, 0, 4), (1, 0, 5, 4)])
def test_what_is_empty_has_no_row(shape):
    assert attention_row(torch.randn(shape), torch.randn(shape)) is None
    assert weights_row(torch.randn(shape)) is None


def test_of_many_heads_and_positions_others_are_looked_at_each_time():
    query, key = torch.zeros(5, 12, 100, 4), torch.ones(5, 12, 100, 4)
    query[3, 7, 61] = 10.0
    rows = [attention_row(query, key, offset=offset) for offset in range(210)]
    values = [row.tolist() for row in rows if row is not None]

    assert {row[0] for row in values} <= {n * 4 * q * 100 for n in (1, 2) for q in (14, 15)}
    assert 20.0 in {row[2] for row in values}, "some sample has the one that is large"


def test_the_first_key_is_always_looked_at():
    query, key = torch.ones(1, 1, 4, 4), torch.zeros(1, 1, 5000, 4)
    key[0, 0, 0] = 10.0
    for offset in range(4):
        row = attention_row(query, key, offset=offset)
        assert row is not None and row[2] == 20.0
        assert row[0] <= 4 * 2048


def test_neither_reads_nor_transfers_from_a_device():
    """On the meta device, where numbers do not exist, reading one would raise."""
    query = torch.empty(2, 8, 50, 4, device="meta", dtype=torch.bfloat16)
    key = torch.empty(2, 2, 50, 4, device="meta", dtype=torch.bfloat16)
    row = attention_row(query, key, is_causal=True)
    assert row is not None and row.device.type == "meta" and len(row) == len(ATTENTION.names)
    row = weights_row(torch.empty(2, 8, 50, 50, device="meta"))
    assert row is not None and row.device.type == "meta"
