"""How gradients are distributed, against numpy's FP16, at the edges of both formats."""

from itertools import product
from math import inf, nan

import pytest
import torch

from mp_agent.probe.statistics import distribution
from mp_agent.probe.statistics.distribution import distribution_row
from mp_agent.probe.statistics.host import CpuStatistics
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.records.columns import DISTRIBUTION, EXPONENTS, exponent_column
from tests.agent.distribution_reference import distribution_reference
from tests.agent.probe.statistics.distributions import around_every_edge, assert_distribution
from tests.agent.probe.statistics.gradients import DTYPES, LAYOUTS, VALUES
from tests.subtests import each

CPU = torch.device("cpu")
_EDGES = [
    *(0.0, -0.0, nan, inf, -inf, 1.0, -1.0, 65504.0, 65519.0, 65520.0, 32760.0, 60000.0),
    *(60000.004, -32759.9, 2.0**-14, 2.0**-14 - 2.0**-25, 2.0**-14 - 2.0**-24, 2.0**-24),
    *(2.0**-25, 2.0**-25 * 1.0001, 2.0**-26, 2.0**-26 * 1.0001, 2.0**-27, 1e-30, 5e-324, 1e-45),
    *(2.0**-48, 2.0**-48 * 0.999, 2.0**15.9, 2.0**16, 1e30, 2.0**-44, 2.0**12),
]


def row_of(
    gradient: torch.Tensor | None, inverse_scale: float = 1.0, loss_scale: float | None = None
) -> dict[str, float]:
    row = distribution_row(gradient, inverse_scale, loss_scale, CPU)
    return dict(zip(DISTRIBUTION.names, row.tolist(), strict=True))


def approximately(row: dict[str, float]) -> object:
    return pytest.approx(row, rel=1e-12, abs=1e-300, nan_ok=True)


@pytest.mark.parametrize("loss_scale", [None, 1.0, 2.0**16, 2.0**-3, 1000.0])
def test_edges_equal_the_reference(loss_scale):
    gradient = torch.tensor(_EDGES, dtype=torch.float64)
    expected = distribution_reference(gradient.tolist(), loss_scale)
    assert row_of(gradient, 1.0, loss_scale) == approximately(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_that_are_still_scaled_are_reported_unscaled(dtype):
    torch.manual_seed(1)
    scaled = (torch.randn(1000) * torch.logspace(-6, 3, 1000)).to(dtype)
    unscaled = (scaled.double() / 2.0**10).tolist()
    found = row_of(scaled, 2.0**-10, 2.0**10)
    assert found == approximately(distribution_reference(unscaled, 2.0**10))


def test_no_element_is_in_two_bins_and_none_but_zeros_in_none():
    gradient = torch.tensor(_EDGES, dtype=torch.float64)
    row = row_of(gradient)
    assert sum(row[exponent_column(e)] for e in EXPONENTS) == row["nonzero_elements"]


@each(
    "gradient",
    [
        torch.empty(0),
        torch.zeros(5),
        torch.full((5,), nan),
        torch.tensor(3.0),
        torch.randn(6, 4).t()[::2],
        torch.randn(3, 2, dtype=torch.complex64),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    ],
)
def test_odd_shapes_equal_the_reference(gradient):
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    expected = distribution_reference(real.double().flatten().tolist(), 4.0)
    assert row_of(gradient, 1.0, 4.0) == approximately(expected)


def test_pieces_add_up(monkeypatch):
    monkeypatch.setattr(distribution, "_PIECE_ELEMENTS_HOST", 7)
    gradient = torch.tensor(_EDGES, dtype=torch.float64)
    expected = distribution_reference(gradient.tolist(), 8.0)
    assert row_of(gradient, 1.0, 8.0) == approximately(expected)


def test_no_gradient_is_no_element():
    assert row_of(None, 1.0, 1.0) == dict.fromkeys(DISTRIBUTION.names, 0.0)


@pytest.fixture(params=[CpuStatistics, lambda: PackedStatistics(CPU)], ids=["cpu", "packed"])
def statistics(request):
    return request.param()


@pytest.mark.parametrize("loss_scale", [None, 2.0**16])
def test_a_table_has_a_row_per_layer(statistics, loss_scale):
    gradients = [*(make() for make in VALUES.values()), None]
    gradients += [make(dtype) for make in LAYOUTS.values() for dtype in DTYPES]
    gradients = [each for each in gradients if each is None or each.numel() < 5000]
    found = statistics.distribution(gradients, 2.0**-16, loss_scale)
    assert_distribution(found, gradients, 2.0**-16, loss_scale, sums=1e-12)
    assert_distribution(statistics.distribution([], 1.0, loss_scale), [])


def test_what_is_not_finite_once_unscaled_counts_as_such(statistics, subtests):
    """A loss scale that is not finite is none."""
    gradients = [torch.tensor([0.0, -0.0, 1e-45, 1e-20, -1.0, 3.0, 3e38, nan, -inf]), None]
    inverse_scales = (nan, inf, -inf, 0.0, -0.0, 1e300, 5e-324, -2.0)
    for scales in product(inverse_scales, (None, 0.0, 1.0, 1e300, inf, nan)):
        with subtests.test(str(scales)):
            found = statistics.distribution(gradients, *scales)
            assert_distribution(found, gradients, *scales, sums=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [(1.0, None), (1 / 3, 1000.0), (2.0**-16, 2.0**16)])
def test_the_numbers_around_every_edge_are_on_the_right_side(statistics, dtype, scales):
    gradients = [around_every_edge(dtype, *scales)]
    assert_distribution(statistics.distribution(gradients, *scales), gradients, *scales, sums=1e-12)


def test_a_gradient_that_is_itself_part_of_a_graph_makes_no_row_that_is(statistics):
    found = statistics.distribution([torch.ones(3, requires_grad=True) * 2.0], 1.0, None)
    assert not found.requires_grad


def test_a_scale_on_a_device_is_not_read(monkeypatch):
    def read(self: torch.Tensor) -> float:
        raise AssertionError("read")

    scale = torch.tensor(2.0**16)
    gradient = torch.tensor(_EDGES)
    expected = row_of(gradient, 1.0, 2.0**16)
    monkeypatch.setattr(torch.Tensor, "__float__", read)
    monkeypatch.setattr(torch.Tensor, "item", read)
    row_C = distribution_row(gradient, torch.ones(()), scale, CPU)
    monkeypatch.undo()
    assert dict(zip(DISTRIBUTION.names, row_C.tolist(), strict=True)) == approximately(expected)
