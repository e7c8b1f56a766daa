"""The accelerator's statistics on a real GPU: the same numerics, and no wait for the device."""

from collections.abc import Iterator

import pytest
import torch

from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.probe.statistics.packed import PackedStatistics
from tests.agent.probe.statistics.gradients import DTYPES, LAYOUTS, VALUES, normal
from tests.agent.probe.statistics.reference import assert_rows, expected_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def statistics() -> GradientStatistics:
    return for_device(torch.device("cuda"))


def test_the_kernels_are_used_where_triton_is_installed(statistics: GradientStatistics) -> None:
    pytest.importorskip("triton", reason="without Triton stock operations do")
    assert isinstance(statistics, FusedStatistics)


def test_kernels_and_stock_operations_agree(statistics: GradientStatistics) -> None:
    stock = PackedStatistics(torch.device("cuda"))
    gradients = [torch.randn(size, device="cuda") for size in (7, 70_001, 9_000_001)]
    gradients += [gradient[1:].bfloat16()[1:] for gradient in gradients]
    torch.testing.assert_close(
        statistics.layers(gradients, 0.5), stock.layers(gradients, 0.5), rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_replicas_get_equal_bits_wherever_they_lie_in_memory(
    statistics: GradientStatistics, dtype: torch.dtype
) -> None:
    gradient = torch.randn(300_001, device="cuda").to(dtype)
    expected = statistics.layers([gradient], 1.0)
    for offset in range(1, 9):
        memory = torch.empty(gradient.numel() + offset, device="cuda", dtype=dtype)
        copy = memory[offset:].copy_(gradient)
        assert torch.equal(statistics.layers([copy], 1.0), expected)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_and_layout_agrees_with_the_reference(
    statistics: GradientStatistics, layout: str, dtype: torch.dtype
) -> None:
    gradient = LAYOUTS[layout](dtype).to("cuda")
    expected = [expected_row([gradient])]
    assert_rows(statistics.totals([[gradient]], 1.0).cpu(), expected)
    assert_rows(statistics.layers([gradient], 1.0).cpu(), expected)


@pytest.mark.parametrize("values", VALUES)
def test_special_values_are_counted_and_never_spoil_the_rest(
    statistics: GradientStatistics, values: str
) -> None:
    gradient = VALUES[values]().to("cuda")
    assert_rows(statistics.layers([gradient], 1.0).cpu(), [expected_row([gradient])])


def test_a_hundred_million_elements_agree_to_a_millionth(statistics: GradientStatistics) -> None:
    gradient = torch.randn(100_000_000, device="cuda")
    row = statistics.totals([[gradient]], 1.0).cpu()[0]
    parts = [part.double().square().sum().item() for part in gradient.split(1_000_000)]
    assert row[0].item() == pytest.approx(sum(parts), rel=1e-6)
    assert row[1].item() == gradient.abs().max().item()


@pytest.mark.usefixtures("waiting_is_an_error")
def test_no_call_waits_for_the_device(statistics: GradientStatistics) -> None:
    sizes = (5, 70_000, 3000, 9_000_000)
    inverse_scale = torch.full((), 0.5, device="cuda")
    for _ in range(3):
        gradients = [torch.zeros(size, device="cuda").add_(1.0) for size in sizes]
        statistics.totals([gradients[:2], gradients[2:]], inverse_scale)
        statistics.layers([*gradients, None], inverse_scale)


def test_no_temporary_is_larger_than_the_scratch(statistics: GradientStatistics) -> None:
    gradient = torch.randn(200_000_000, device="cuda")
    statistics.totals([[normal(10).to("cuda")]], 1.0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    statistics.totals([[gradient]], 1.0)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 32 * 2**20


def test_replicas_get_equal_bits_on_every_call(statistics: GradientStatistics) -> None:
    gradients = [torch.randn(size, device="cuda") for size in (1000, 300_000, 9_000_000)]
    first = statistics.totals([gradients], 1.0)
    for _ in range(5):
        copies = [gradient.clone() for gradient in gradients]
        assert torch.equal(statistics.totals([copies], 1.0), first)
