"""Rows of output logits against float64."""

from math import exp, fsum, inf, isfinite, isnan, log, nan

import pytest
import torch

from mp_agent.probe.instruments.attention_logits import ROWS_AT_MOST, logits_row
from mp_agent.records.columns import LOGITS
from tests.subtests import each


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _logsumexp(row: list[float]) -> float:
    if any(map(isnan, row)) or inf in row:
        return nan
    largest = max(row)
    return largest if largest == -inf else largest + log(fsum(exp(v - largest) for v in row))


def reference(logits: torch.Tensor, target: torch.Tensor) -> list[float]:
    """The columns of `LOGITS`, over all rows."""
    rows = (logits.movedim(1, -1) if logits.dim() > 1 else logits.unsqueeze(0)).double()
    kept = rows.reshape(-1, rows.shape[-1]).tolist()
    if not target.is_floating_point():
        pairs = zip(kept, target.reshape(-1).tolist(), strict=True)
        kept = [row for row, index in pairs if index != -100]
    sums = [_logsumexp(row) for row in kept]
    finite = [value for value in sums if isfinite(value)]
    return [
        float(len(kept)),
        float(len(sums) - len(finite)),
        max((value for row in kept for value in row if isfinite(value)), default=nan),
        max(finite, default=nan),
        min(finite, default=nan),
        fsum(finite),
    ]


def _with(value: float, place: tuple[int, int] = (1, 2)) -> torch.Tensor:
    logits = _random(4, 5)
    logits[place] = value
    return logits


CLASSES = torch.tensor([0, 1, 2, 3])
CASES = {
    "rows": (_random(4, 5), CLASSES),
    "float64": (_random(4, 5, dtype=torch.float64), CLASSES),
    "float16": (_random(4, 5, dtype=torch.float16), CLASSES),
    "bfloat16": (_random(4, 5, dtype=torch.bfloat16), CLASSES),
    "large": (_random(4, 5) * 1e30, CLASSES),
    "far below zero": (_random(4, 5) - 500.0, CLASSES),
    "ignored rows": (_random(4, 5), torch.tensor([0, -100, 2, -100])),
    "all ignored": (_random(4, 5), torch.full((4,), -100)),
    "NaN": (_with(nan), CLASSES),
    "Inf": (_with(inf), CLASSES),
    "a class that is masked": (_with(-inf), CLASSES),
    "NaN in an ignored row": (_with(nan), torch.tensor([0, -100, 2, 3])),
    "all NaN": (torch.full((4, 5), nan), CLASSES),
    "all masked": (torch.full((4, 5), -inf), CLASSES),
    "one row": (_random(5), torch.tensor(2)),
    "one class": (_random(4, 1), torch.zeros(4, dtype=torch.long)),
    "an image": (_random(2, 5, 2, 3), torch.ones(2, 2, 3, dtype=torch.long)),
    "probabilities": (_random(4, 5), _random(4, 5).softmax(1)),
    "strided": (_random(5, 4).T, CLASSES),
}


@each("name", CASES)
def test_a_row_agrees_with_float64_where_all_is_looked_at(name):
    logits, target = CASES[name]
    found = logits_row(logits, target)
    assert found is not None and found.dtype is torch.float64
    assert found.tolist() == pytest.approx(reference(logits, target), rel=1e-5, nan_ok=True)


def test_another_index_may_be_the_one_that_is_ignored():
    row = logits_row(_random(4, 5), CLASSES, ignore_index=2)
    assert row is not None and row[0] == 3.0


def test_of_many_rows_others_are_looked_at_each_time():
    logits = torch.zeros(1000, 3)
    logits[777, 1] = 50.0
    target = torch.zeros(1000, dtype=torch.long)
    rows = [logits_row(logits, target, offset=offset) for offset in range(32)]
    values = [row.tolist() for row in rows if row is not None]
    assert all(ROWS_AT_MOST - 1 <= row[0] <= ROWS_AT_MOST for row in values)
    assert sum(row[2] == 50.0 for row in values) == 1
    image = logits_row(torch.zeros(3, 4, 50, 50), torch.zeros(3, 50, 50, dtype=torch.long))
    assert image is not None and 0 < image[0] <= ROWS_AT_MOST


def test_nothing_has_no_row_and_nothing_is_read_from_a_device():
    assert logits_row(torch.empty(0, 5), torch.empty(0, dtype=torch.long)) is None
    target = torch.empty(9, device="meta", dtype=torch.long)
    row = logits_row(torch.empty(9, 5, device="meta"), target)
    assert row is not None and row.device.type == "meta" and len(row) == len(LOGITS.names)
