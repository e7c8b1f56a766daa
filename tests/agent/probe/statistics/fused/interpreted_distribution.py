"""The kernels of the distribution in Triton's interpreter, against the reference.

Run by `test_interpreted`, like `interpreted_kernels`.
"""

from math import inf, nan

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mp_agent.probe.statistics.fused import distribution_kernels, launches
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.records.columns import DISTRIBUTION
from tests.agent.probe.statistics.distributions import around_every_edge, assert_distribution
from tests.agent.probe.statistics.gradients import LAYOUTS, VALUES, normal
from tests.agent.probe.statistics.test_every_column import gradients_of_any_kind

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for what overflows

CPU = torch.device("cpu")
ROWS = distribution_kernels.ROWS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = [
    (1.0, None),
    (1.0, 2.0**16),
    (2.0**-16, 2.0**16),
    (1 / 3, 1000.0),
    (2.0**20, 2.0**-3),
    (1e-300, 1e290),
    (1e250, 1e-240),
]
"""1 / the factor by which gradients are still multiplied, and the loss scale."""


@pytest.fixture(autouse=True)
def _wide_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by operations, hardly by how many elements each has."""
    monkeypatch.setattr(distribution_kernels, "ROWS", 4096)


@pytest.fixture
def no_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the kernels leave a gradient to stock operations."""
    monkeypatch.setattr(
        "mp_agent.probe.statistics.fused.statistics.distribution_rows",
        lambda *_: pytest.fail("measured with stock operations"),
    )


@pytest.fixture
def statistics() -> FusedStatistics:
    return FusedStatistics(CPU, launches, distribution_kernels)


def test_the_kernels_write_every_column() -> None:
    assert set(distribution_kernels.COLUMNS) == set(DISTRIBUTION.names)


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_layout_agrees_with_the_reference(
    statistics: FusedStatistics, dtype: torch.dtype
) -> None:
    large = dtype is torch.float32
    gradients = [
        gradient
        for name, make in LAYOUTS.items()
        if (gradient := make(dtype)).numel() <= 2000 or (large and name in ("large_gaps", "chunk"))
    ]
    assert_distribution(statistics.distribution(gradients, 1.0, 8.0), gradients, 1.0, 8.0)


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_are_counted_and_never_spoil_the_sums(
    statistics: FusedStatistics, dtype: torch.dtype
) -> None:
    made = [values for make in VALUES.values() if (values := make()).dtype is torch.float32]
    gradients: list[torch.Tensor | None] = [
        values[:9000].to(dtype) if values.layout is torch.strided else values for values in made
    ]
    gradients += [None, VALUES["complex"](), VALUES["complex_conjugated"]()]
    assert_distribution(statistics.distribution(gradients, 1.0, None), gradients)


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize(("inverse_scale", "loss_scale"), SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_numbers_around_every_edge_are_on_the_right_side(
    statistics: FusedStatistics,
    dtype: torch.dtype,
    inverse_scale: float,
    loss_scale: float | None,
) -> None:
    gradients = [around_every_edge(dtype, inverse_scale, loss_scale)]
    found = statistics.distribution(gradients, inverse_scale, loss_scale)
    assert_distribution(found, gradients, inverse_scale, loss_scale)


ANY_SCALE = st.floats(min_value=5e-324, max_value=1e307)


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ANY_SCALE, ANY_SCALE | st.none())
@example(5e-324, 1e307)
@example(1e307, 5e-324)
@example(3e-310, 2.0**16)
def test_the_edges_are_right_for_any_scale(
    statistics: FusedStatistics, inverse_scale: float, loss_scale: float | None
) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1.0, 3.4e38, nan, inf])
    # What is compared with the edges of scales as extreme as that overflows or vanishes.
    edges = [around_every_edge(torch.float32, min(max(inverse_scale, 1e-100), 1e100), None)]
    gradients = [torch.cat([special, *edges])]
    found = statistics.distribution(gradients, inverse_scale, loss_scale)
    assert_distribution(found, gradients, inverse_scale, loss_scale)


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("inverse_scale", [nan, inf, -inf, 0.0, -0.0, 1e300, 5e-324, -2.0])
@pytest.mark.parametrize("loss_scale", [None, 0.0, 1.0, 1e300, inf, nan])
def test_scales_that_no_run_should_have_give_what_stock_operations_give(
    statistics: FusedStatistics, inverse_scale: float, loss_scale: float | None
) -> None:
    gradients = [torch.tensor([0.0, -0.0, 1e-45, 1e-20, -1.0, 3.0, 3e38, nan, -inf]), None]
    found = statistics.distribution(gradients, inverse_scale, loss_scale)
    assert_distribution(found, gradients, inverse_scale, loss_scale)


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("inverse_scale", [1.0, -0.5, 1e300])
def test_a_negative_loss_scale_counts_like_stock_operations(
    statistics: FusedStatistics, inverse_scale: float
) -> None:
    """The reference has nothing to say of it."""
    gradients = [torch.tensor([0.0, 1e-45, 1e-20, -1.0, 3.0, 3e38, nan, -inf])]
    counts = [name not in ("sum", "sum_squares") for name in DISTRIBUTION.names]
    found = statistics.distribution(gradients, inverse_scale, -4.0)
    stock = PackedStatistics(CPU).distribution(gradients, inverse_scale, -4.0)
    assert torch.equal(found[:, counts], stock[:, counts])


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("inverse_scale", [torch.tensor(2.0**-16), torch.tensor([0.25])], ids=str)
def test_scales_may_be_tensors(statistics: FusedStatistics, inverse_scale: torch.Tensor) -> None:
    gradients = [normal(1000), normal(40, 50, dtype=torch.float16)]
    found = statistics.distribution(gradients, inverse_scale, torch.tensor([65536.0]))
    assert_distribution(found, gradients, float(inverse_scale), 65536.0)


def test_the_sums_of_huge_and_of_tiny_numbers_are_exact(statistics: FusedStatistics) -> None:
    """Where their squares leave float32, everything is added in float64."""
    gradients = [VALUES[name]() for name in ("huge", "tiny", "subnormal", "huge_and_tiny")]
    assert_distribution(statistics.distribution(gradients, 1.0, None), gradients, sums=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_measured_with_stock_operations(
    statistics: FusedStatistics, dtype: torch.dtype
) -> None:
    gradients = [normal(100), normal(50).to(dtype)]
    assert_distribution(statistics.distribution(gradients, 0.5, 4.0), gradients, 0.5, 4.0)


@pytest.mark.usefixtures("no_stock")
def test_the_tables_are_those_of_the_layers(
    statistics: FusedStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = [normal(size) for size in (5, 700, 64, 3000)]
    statistics.layers(gradients, 1.0)
    for name in ("make_chunk_tables", "send"):
        monkeypatch.setattr(
            f"mp_agent.probe.statistics.fused.chunks.{name}",
            lambda *_: pytest.fail("the tables were made or sent again"),
        )
    assert_distribution(statistics.distribution(gradients, 1.0, None), gradients)
    monkeypatch.undo()
    for missing in (0, 3):
        layers = [None if at == missing else each for at, each in enumerate(gradients)]
        assert_distribution(statistics.distribution(layers, 1.0, None), layers)
    assert_distribution(statistics.distribution([None, None], 1.0, 2.0), [None, None], 1.0, 2.0)
    assert_distribution(statistics.distribution([], 1.0, 2.0), [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replicas_get_equal_bits_wherever_they_lie_in_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution_kernels, "ROWS", ROWS)
    statistics = FusedStatistics(CPU, launches, distribution_kernels)
    gradient = normal(9001, dtype=dtype)
    expected = statistics.distribution([gradient], 1.0, 2.0)
    for offset in (1, 2):
        memory = torch.empty(gradient.numel() + offset, dtype=dtype)
        copy = memory[offset:].copy_(gradient)
        assert torch.equal(statistics.distribution([copy], 1.0, 2.0), expected)


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_several_blocks_and_chunks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes around the edges of a block and of a chunk; a layer of more chunks than are folded."""
    monkeypatch.setattr(distribution_kernels, "ROWS", 16)
    statistics = FusedStatistics(CPU, launches, distribution_kernels, chunk_elements=256)
    sizes = [1, 15, 17, 63, 64, 65, 127, 128, 255, 256, 257, 513, 34 * 256]
    gradients = [normal(size, dtype=dtype, seed=size) for size in sizes]
    gradients += [normal(30, 70, dtype=dtype).t()[:, 3:], normal(9, 200, dtype=dtype)[:, ::3]]
    gradients += [normal(7, 5, 4, 9, dtype=dtype)[:, :3, :, ::2]]
    gradients[3][5], gradients[-1][0, 0, 0, 0] = nan, inf
    assert_distribution(statistics.distribution(gradients, 1.0, 8.0), gradients, 1.0, 8.0)


@settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(gradients_of_any_kind())
def test_any_gradient_agrees_with_the_reference(
    statistics: FusedStatistics, gradient: torch.Tensor
) -> None:
    assert_distribution(statistics.distribution([gradient], 1.0, 4.0), [gradient], 1.0, 4.0)


def test_gradients_are_only_read_and_need_no_gradient(statistics: FusedStatistics) -> None:
    gradient = normal(1000).requires_grad_()
    version, before = gradient._version, gradient.detach().clone()
    with torch.inference_mode():
        assert_distribution(statistics.distribution([gradient], 0.5, 1.0), [gradient], 0.5, 1.0)
    found = statistics.distribution([gradient * 1.0], torch.tensor(1.0), None)
    assert not found.requires_grad
    assert gradient._version == version
    assert torch.equal(gradient.detach(), before)
