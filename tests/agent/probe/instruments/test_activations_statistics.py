"""Rows of outputs against plain Python, on the way of the host and on that of a device."""

from math import fsum, inf, isfinite, isinf, isnan, nan
from sys import float_info

import pytest
import torch

from mp_agent.probe.instruments import activation_modules
from mp_agent.probe.instruments.activation_modules import all_finite, measurable, output_row
from mp_agent.probe.statistics.pieces import folded, pieces, stored_values
from mp_agent.records.columns import ACTIVATIONS
from tests.agent.probe.instruments.odd_tensors import ODD_TENSORS, random
from tests.subtests import each

LIMIT = 60_000.0
CALL = 7


def reference(tensor: torch.Tensor) -> list[float]:
    """The columns of `ACTIVATIONS`, written as plainly as can be."""
    if tensor.is_complex():
        flat = [part for value in tensor.flatten().tolist() for part in (value.real, value.imag)]
    else:
        flat = tensor.double().flatten().tolist()
    finite = [value for value in flat if isfinite(value)]
    nonfinite = len(flat) - len(finite)
    near = [v for v in finite if abs(v) > LIMIT] if tensor.dtype is torch.float16 else []
    return [
        float(len(flat)),
        _sum(finite),
        _sum([min(value * value, float_info.max) for value in finite]),
        max(map(abs, finite), default=nan),
        float(sum(value == 0.0 for value in flat)),
        float(sum(map(isnan, flat))),
        float(sum(map(isinf, flat))),
        float(len(near)),
        float(CALL) if nonfinite else nan,
        nan,
        nan,
    ]


def _sum(values: list[float]) -> float:
    try:
        return min(max(fsum(values), -float_info.max), float_info.max)
    except OverflowError:
        return float_info.max if values[0] > 0 else -float_info.max


CASES = {
    **ODD_TENSORS,
    "a float64 sum beyond": torch.tensor([1e308, 1e308, 1e308], dtype=torch.float64),
    "transposed": random(4, 5, 6).transpose(0, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_agrees_with_plain_python(name, monkeypatch):
    monkeypatch.setattr(activation_modules, "_HOST_CHUNK_ELEMENTS", 128)
    row = output_row(CASES[name], CALL, LIMIT)

    assert row.dtype is torch.float64
    assert row.tolist() == pytest.approx(reference(CASES[name]), rel=1e-12, abs=1e-12, nan_ok=True)


@each("name", CASES)
def test_the_way_of_a_device_gives_the_same_row(name):
    output = CASES[name]
    limit = LIMIT if output.dtype is torch.float16 else inf
    rows = [
        activation_modules._row_on_device(piece, CALL, limit)
        for piece in pieces(stored_values(output), 128)
    ]

    row = folded(ACTIVATIONS, rows)
    assert row.tolist() == pytest.approx(reference(output), rel=1e-12, abs=1e-12, nan_ok=True)


def test_measuring_leaves_the_output_as_it_is():
    for output in (CASES["NaN and Inf"], CASES["a float64 sum beyond"]):
        before = output.clone()
        output_row(output, CALL, LIMIT)
        activation_modules._row_on_device(output, CALL, inf)
        torch.testing.assert_close(output, before, rtol=0, atol=0, equal_nan=True)


def test_rows_of_several_calls_become_one_of_all_elements():
    parts = [CASES["float32"], CASES["NaN and Inf"], CASES["all NaN"]]
    row = folded(ACTIVATIONS, [output_row(part, CALL, LIMIT) for part in parts])

    everything = torch.cat([part.flatten() for part in parts])
    assert row.tolist() == pytest.approx(reference(everything), rel=1e-6, nan_ok=True)


def test_the_earliest_nonfinite_call_counts():
    rows = [output_row(CASES["all NaN"], call, LIMIT) for call in (9, 4, 6)]

    assert folded(ACTIVATIONS, rows)[ACTIVATIONS.names.index("nonfinite_call")] == 4.0


@pytest.mark.parametrize(
    "tensor", [torch.empty(0, 3), torch.arange(4), torch.tensor([True]), torch.eye(2).to_sparse()]
)
def test_what_is_empty_or_no_number_is_not_measured(tensor):
    assert not measurable(tensor)


def test_nothing_is_read_back_from_a_device(monkeypatch):
    """On the meta device, where numbers do not exist, reading one would raise."""
    monkeypatch.setattr(activation_modules, "_DEVICE_CHUNK_ELEMENTS", 8)
    row = output_row(torch.empty(20, dtype=torch.float16, device="meta"), CALL, LIMIT)

    assert (row.device.type, row.shape) == ("meta", (len(ACTIVATIONS.names),))
    assert all_finite(torch.empty(20, dtype=torch.float16, device="meta")).device.type == "meta"


@pytest.mark.parametrize("name", CASES)
def test_all_finite_agrees_with_the_row(name, monkeypatch):
    monkeypatch.setattr(activation_modules, "_DEVICE_CHUNK_ELEMENTS", 3)
    row = dict(zip(ACTIVATIONS.names, reference(CASES[name]), strict=True))
    nonfinite = row["nan_elements"] + row["inf_elements"]
    assert bool(all_finite(CASES[name])) == (nonfinite == 0.0)


@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each("value", [nan, inf, -inf])
@each("place", [0, 9_999, 19_999])
def test_one_element_that_is_not_finite_is_seen(dtype, value, place):
    values = torch.full((200, 100), torch.finfo(dtype).max, dtype=dtype)
    values[100:] = torch.finfo(dtype).min
    assert all_finite(values).item()
    assert all_finite(values.T).item()
    assert all_finite(values[::3, ::2]).item()
    values.view(-1)[place] = value
    assert not all_finite(values).item()
    assert not all_finite(values.T).item()
