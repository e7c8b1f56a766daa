"""Rows of watched tensors against NumPy, one element at a time."""

from math import inf, nan

import numpy as np
import pytest
import torch

from mp_agent.probe.instruments import tensors
from mp_agent.probe.instruments.tensors import (
    RunningSum,
    counted_in_lanes,
    magnitudes_in_bins,
    tensor_row,
)
from mp_agent.records.columns import TENSOR_EXPONENTS, TENSORS
from mp_agent.records.tensor_collections import index_of, ratio_of
from tests.agent.probe.instruments import tensor_reference as reference
from tests.agent.probe.instruments.odd_tensors import ODD_TENSORS, random

CASES = {
    **ODD_TENSORS,
    "bfloat16 of one sign": random(2000, dtype=torch.bfloat16).abs(),
    "float16 beyond its limit": torch.tensor([60000.0, 60000.0, 1.0], dtype=torch.float16),
    "a large term first": torch.tensor([2048.0] + [1.0] * 300, dtype=torch.float16),
    "a large term last": torch.tensor([1.0] * 300 + [2048.0], dtype=torch.float16),
    "conjugate": torch.complex(random(5), random(5)).conj(),
    "integers": torch.arange(-3, 500),
    "unsigned": torch.tensor([0, 255], dtype=torch.uint8),
    "truth values": torch.tensor([True, False, True]),
    "powers of two": torch.tensor(
        [
            2.0**-64,
            2.0**-65,
            1.9999999 * 2.0**-64,
            2.0**-63,
            2.0**31,
            2.0**32,
            0.99999994,
            1.0,
            -2.0,
        ],
    ),
}


def columns(row: torch.Tensor) -> dict[str, float]:
    return dict(zip(TENSORS.names, row.tolist(), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_row_agrees_with_numpy(name, monkeypatch):
    monkeypatch.setattr(tensors, "_HOST_CHUNK_ELEMENTS", 128)
    tensor = CASES[name]

    found = columns(tensor_row(tensor.resolve_conj(), dim=None, reduction=True))
    assert np.isnan(found.pop("range_ratio")), "no dimension was asked for"
    expected = reference.row(tensor, reduction=True)
    assert found == pytest.approx(expected, rel=1e-12, abs=0.0, nan_ok=True)


def test_float8_is_measured_as_the_numbers_that_it_stores():
    tensor = torch.tensor([448.0, -0.0, 0.001953125, 1.0, nan]).to(torch.float8_e4m3fn)

    found = columns(tensor_row(tensor, dim=None, reduction=False))
    assert (found["abs_max"], found["abs_min"]) == (448.0, 0.001953125)
    assert (found["elements"], found["nonfinite_elements"]) == (5.0, 1.0)
    assert found["swallowed_sum"] == 1.001953125, "448 stays what it was"


def test_the_documents_example_loses_its_small_term():
    terms = torch.tensor([10_000.0, 0.1], dtype=torch.float16)
    found = columns(tensor_row(terms, dim=None, reduction=True))

    assert found["swallowed_sum"] == float(terms[1])
    assert terms[0] + terms[1] == terms[0], "as torch adds them"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_running_sum_is_judged_as_one_that_torch_adds_up_in_the_dtype(dtype):
    """As long as it can follow: here no addition is rounded but those that lose the term."""
    terms = torch.tensor([256.0 if dtype is torch.bfloat16 else 2048.0] + [0.5] * 50, dtype=dtype)
    total, lost = terms[0], 0.0
    for term in terms[1:]:
        after = total + term
        lost += float(term) if after == total else 0.0
        total = after
    running = RunningSum(dtype, terms.device)

    assert float(running.lost(terms.double())) == lost == 25.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_itself_sums_in_more_than_16_bits(dtype):
    """Why a large share is no trouble unless the script says that it sums in the dtype."""
    terms = torch.ones(8192, dtype=dtype)

    assert float(terms.sum()) == 8192.0
    found = columns(tensor_row(terms, dim=None, reduction=False))
    assert found["swallowed_sum"] > 0.5 * found["abs_sum"]


def test_the_sum_goes_on_from_chunk_to_chunk():
    terms = torch.tensor([2048.0] + [1.0] * 99, dtype=torch.float16).double()
    running = RunningSum(torch.float16, terms.device)
    together = sum(float(running.lost(part)) for part in terms.split(7))

    whole = RunningSum(torch.float16, terms.device)
    assert together == float(whole.lost(terms)) > 0.0


SLICES = {
    "one too large": (torch.tensor([[-1000.0, -1.0, 2.0], [1000.0, 1.0, -1.0]]), 1),
    "one too small": (torch.tensor([[-1000.0, -1.0, 900.0], [1000.0, 1.0, -800.0]]), -1),
    "half precision": (random(6, 4, 5, dtype=torch.float16) * torch.tensor([1, 1, 64, 1, 1]), 2),
    "in the middle": (random(6, 4, 5) * torch.tensor([1.0, 1e-5, 1.0, 1.0])[:, None], 1),
    "transposed": ((random(6, 4) * torch.tensor([1.0, 1.0, 1e6, 1.0])).t(), 0),
    "with NaN, Inf and a constant": (
        torch.tensor([[nan, 5.0, 1.0, 2.0], [inf, 5.0, 2.0, 4.0], [-inf, 5.0, -1.0, 8.0]]),
        1,
    ),
    "integers": (torch.tensor([[1, 100], [3, 900]]), 1),
}


@pytest.mark.parametrize("limit", [4, 16, 1 << 20])
@pytest.mark.parametrize("name", SLICES)
def test_ranges_are_compared_between_slices(name, limit, monkeypatch):
    monkeypatch.setattr(tensors, "_HOST_CHUNK_ELEMENTS", limit)
    tensor, dim = SLICES[name]

    value = columns(tensor_row(tensor, dim=dim % tensor.dim(), reduction=False))["range_ratio"]
    ranges = reference.ranges(reference.values_of(tensor), dim)
    there = np.where(ranges > 0.0, ranges, nan)
    middle = np.exp(np.nanmean(np.log(there)))
    too_large = np.nanmax(there) / middle >= middle / np.nanmin(there)
    fault = np.nanargmax(there) if too_large else np.nanargmin(there)
    assert ratio_of(value) == pytest.approx(np.nanmax(there) / np.nanmin(there), rel=2.0**-31)
    assert index_of(value) == fault


@pytest.mark.parametrize(
    ("tensor", "dim"),
    [
        (torch.ones(3, 4), 1),
        (torch.randn(7), 0),
        (torch.randn(5, 1), 1),
        (torch.full((2, 2), nan), 0),
    ],
)
def test_without_two_slices_that_have_a_range_there_is_no_ratio(tensor, dim):
    found = columns(tensor_row(tensor, dim=dim, reduction=False))
    assert np.isnan(found["range_ratio"])


def test_ranges_beyond_float64_give_a_finite_ratio():
    tensor = torch.tensor([[1.7e308, 5e-324], [-1.7e308, 0.0]], dtype=torch.float64)
    value = columns(tensor_row(tensor, dim=1, reduction=False))["range_ratio"]

    assert (np.isfinite(value), ratio_of(value) > 1e308) == (True, True)


def test_magnitudes_are_counted_by_binade_to_the_ends_of_float64():
    extremes = torch.tensor([0.0, -0.0, 5e-324, 1e-310, 1e308], dtype=torch.float64).abs()
    magnitudes = torch.cat([random(5000).double().abs(), extremes])

    expected = reference.bins(magnitudes[magnitudes > 0].numpy())
    assert magnitudes_in_bins(magnitudes).tolist() == list(expected.values())


def test_on_a_device_threads_count_apart_to_the_same_numbers():
    places = torch.randint(0, len(TENSOR_EXPONENTS), (5000,))
    expected = torch.bincount(places, minlength=len(TENSOR_EXPONENTS)).double()

    torch.testing.assert_close(counted_in_lanes(places), expected, rtol=0, atol=0)


def test_measuring_leaves_the_tensor_as_it_is():
    for name in ("NaN and Inf", "float16 at its limits", "strided"):
        tensor = CASES[name]
        before = tensor.clone()
        tensor_row(tensor, dim=0, reduction=True)
        torch.testing.assert_close(tensor, before, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_read_back_from_a_device(monkeypatch):
    """On the meta device, where numbers do not exist, reading one would raise."""
    monkeypatch.setattr(tensors, "_DEVICE_CHUNK_ELEMENTS", 8)
    tensor = torch.empty(5, 4, dtype=torch.float16, device="meta")
    row = tensor_row(tensor, dim=1, reduction=True)

    assert (row.device.type, row.shape) == ("meta", (len(TENSORS.names),))
