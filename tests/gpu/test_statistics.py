"""The accelerator's statistics on a GPU: the same numerics, and no wait for the device.

Without a GPU the same operations run on the processor, all but those of memory and of waiting.
"""

import pytest
import torch

from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.statistics.fused.build import DISTRIBUTION_KERNELS, _say_once, launchable
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.records.columns import DISTRIBUTION
from tests.agent.probe.statistics.distributions import around_every_edge, assert_distribution
from tests.agent.probe.statistics.gradients import DTYPES, LAYOUTS, VALUES, normal
from tests.agent.probe.statistics.reference import assert_rows, assert_totals, expected_row
from tests.gpu.machine import Machine, placed

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


SCALES = [(1.0, None), (2.0**-16, 2.0**16), (1 / 3, 1000.0)]
"""1 / the factor by which gradients are still multiplied, and the loss scale."""


@pytest.fixture
def statistics(machine: Machine) -> GradientStatistics:
    return for_device(machine.device, distribution=True)


@pytest.mark.gpu
@on_a_gpu
def test_the_kernels_are_used_where_triton_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    """Else the log has the reason, and most of the tests below are of stock operations."""
    pytest.importorskip("triton", reason="without Triton stock operations do")
    launchable.cache_clear()  # an earlier test may have been warned, and the reason logged there
    _say_once.cache_clear()
    device = torch.device("cuda")
    assert isinstance(for_device(device), FusedStatistics), caplog.text
    assert launchable(device, DISTRIBUTION_KERNELS) is not None, caplog.text


@pytest.mark.gpu
@on_a_gpu
def test_kernels_and_stock_operations_agree(statistics: GradientStatistics) -> None:
    stock = PackedStatistics(torch.device("cuda"))
    gradients = [torch.randn(size, device="cuda") for size in (7, 70_001, 9_000_001)]
    gradients += [gradient[1:].bfloat16()[1:] for gradient in gradients]
    torch.testing.assert_close(
        statistics.layers(gradients, 0.5), stock.layers(gradients, 0.5), rtol=1e-6, atol=0.0
    )
    scale = torch.tensor(2.0**12, device="cuda")
    found, expected = (
        each.distribution([*gradients, None], 0.5, scale) for each in (statistics, stock)
    )
    counts = [name not in ("sum", "sum_squares") for name in DISTRIBUTION.names]
    assert torch.equal(found[:, counts], expected[:, counts])
    # The sum cancels; what it may be off by goes by the number of elements.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1.0)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_replicas_get_equal_bits_wherever_they_lie_in_memory(
    statistics: GradientStatistics, dtype: torch.dtype
) -> None:
    gradient = torch.randn(300_001, device="cuda").to(dtype)
    expected = statistics.layers([gradient], 1.0)
    distribution = statistics.distribution([gradient], 1.0, 2.0)
    for offset in range(1, 9):
        memory = torch.empty(gradient.numel() + offset, device="cuda", dtype=dtype)
        copy = memory[offset:].copy_(gradient)
        assert torch.equal(statistics.layers([copy], 1.0), expected)
        assert torch.equal(statistics.distribution([copy], 1.0, 2.0), distribution)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_and_layout_agrees_with_the_reference(
    statistics: GradientStatistics, machine: Machine, layout: str, dtype: torch.dtype
) -> None:
    gradient = placed(LAYOUTS[layout](dtype), machine.device)
    assert gradient.stride() == LAYOUTS[layout](dtype).stride()
    expected = [expected_row([gradient])]
    assert_totals(statistics.totals([[gradient]], 1.0).cpu(), expected)
    assert_rows(statistics.layers([gradient], 1.0).cpu(), expected)


@pytest.mark.parametrize("values", VALUES)
def test_special_values_are_counted_and_never_spoil_the_rest(
    statistics: GradientStatistics, machine: Machine, values: str
) -> None:
    gradient = placed(VALUES[values](), machine.device)
    assert_rows(statistics.layers([gradient], 1.0).cpu(), [expected_row([gradient])])


@pytest.mark.parametrize(("inverse_scale", "loss_scale"), SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_distribution_agrees_with_the_reference_at_every_edge(
    statistics: GradientStatistics,
    machine: Machine,
    dtype: torch.dtype,
    inverse_scale: float,
    loss_scale: float | None,
) -> None:
    gradients = [around_every_edge(dtype, inverse_scale, loss_scale), normal(70_000).to(dtype)[1:]]
    placed_there = [placed(gradient, machine.device) for gradient in gradients]
    scales = (inverse_scale, loss_scale)
    found = statistics.distribution(placed_there, *scales).cpu()
    assert_distribution(found, gradients, *scales)


@pytest.mark.gpu
@on_a_gpu
def test_a_hundred_million_elements_agree_to_a_millionth(statistics: GradientStatistics) -> None:
    gradient = torch.randn(100_000_000, device="cuda")
    row = statistics.totals([[gradient]], 1.0).cpu()[0]
    parts = [part.double().square().sum().item() for part in gradient.split(1_000_000)]
    assert row[0].item() == pytest.approx(sum(parts), rel=1e-6)
    assert row[1].item() == gradient.abs().max().item()


@pytest.mark.gpu
@on_a_gpu
def test_no_call_waits_for_the_device(statistics: GradientStatistics, machine: Machine) -> None:
    """Nor a first call, nor one with a set of gradients that was not there before."""
    sizes = (5, 70_000, 3000, 9_000_000)
    inverse_scale = torch.full((), 0.5, device="cuda")
    machine.finish()
    with machine.waiting_is_an_error():
        for absent in range(3):
            gradients = [torch.zeros(size, device="cuda").add_(1.0) for size in sizes]
            statistics.totals([gradients[:2], gradients[2:]], inverse_scale)
            statistics.layers([*gradients[absent:], None], inverse_scale)
            statistics.distribution([*gradients[absent:], None], inverse_scale, inverse_scale)
            statistics.digests(gradients)


@pytest.mark.gpu
@on_a_gpu
def test_no_temporary_is_larger_than_the_scratch(statistics: GradientStatistics) -> None:
    gradient = torch.randn(200_000_000, device="cuda")
    statistics.totals([[normal(10).to("cuda")]], 1.0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    statistics.totals([[gradient]], 1.0)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 32 * 2**20


def test_replicas_get_equal_bits_on_every_call(
    statistics: GradientStatistics, machine: Machine
) -> None:
    sizes = (1000, 300_000, 9_000_000 if machine.simulated is None else 90_000)
    gradients = [torch.randn(size, device=machine.device) for size in sizes]
    first = statistics.totals([gradients], 1.0)
    for _ in range(5):
        copies = [gradient.clone() for gradient in gradients]
        found = statistics.totals([copies], 1.0)
        torch.testing.assert_close(found, first, rtol=0.0, atol=0.0, equal_nan=True)
