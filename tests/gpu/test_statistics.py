"""The accelerator's statistics on a real GPU: the same numerics, and no wait for the device."""

from collections.abc import Iterator

import pytest
import torch

from mp_agent.probe.statistics import GradientStatistics, for_device
from tests.agent.probe.statistics.gradients import DTYPES, LAYOUTS, VALUES, normal
from tests.agent.probe.statistics.reference import assert_rows, expected_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def statistics() -> GradientStatistics:
    return for_device(torch.device("cuda"))


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
