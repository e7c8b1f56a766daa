"""The kernels in Triton's interpreter, against the reference; run by `test_interpreted`.

Triton decides when it is imported whether to interpret, so these run in their own process.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mp_agent.probe.statistics.fused import kernels, launches
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES
from tests.agent.probe.statistics.gradients import LAYOUTS, VALUES, normal
from tests.agent.probe.statistics.reference import (
    assert_rows,
    assert_totals,
    by_name,
    expected_row,
    totals_of,
)
from tests.agent.probe.statistics.test_every_column import gradients_of_any_kind

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for what overflows

CPU = torch.device("cpu")
ROWS = kernels.ROWS
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUSED_VALUES = {
    name: make for name, make in VALUES.items() if make().dtype in (torch.float32, torch.complex64)
}


LARGE = ("large_gaps", "chunk_plus_one")
ODD = ("some_subnormal", "negative_nan", "some_zeros", "nan_among_tiny")
"""Layouts of more than a chunk, and values that are tried at an odd address too."""


@pytest.fixture(autouse=True)
def _wide_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by operations, hardly by how many elements each has."""
    monkeypatch.setattr(kernels, "ROWS", 4096)


@pytest.fixture
def no_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the kernels leave a gradient to stock operations."""
    for name in ("layers", "totals"):
        monkeypatch.setattr(
            f"mp_agent.probe.statistics.packed.PackedStatistics.{name}",
            lambda *_: pytest.fail("measured with stock operations"),
        )


def test_the_kernels_write_every_column() -> None:
    assert set(launches.COLUMNS) == set(GRADIENT_COLUMN_NAMES)


@pytest.fixture
def statistics() -> FusedStatistics:
    return FusedStatistics(CPU, launches)


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_layout_agrees_with_the_reference(
    statistics: FusedStatistics, dtype: torch.dtype
) -> None:
    large = dtype is torch.float32
    gradients = [
        gradient
        for name, make in LAYOUTS.items()
        if (gradient := make(dtype)).numel() <= 2000 or (large and name in LARGE)
    ]
    assert_rows(statistics.layers(gradients, 1.0), [expected_row([each]) for each in gradients])


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("dtype", FUSED_DTYPES, ids=str)
def test_special_values_are_counted_and_never_spoil_the_rest(
    statistics: FusedStatistics, dtype: torch.dtype
) -> None:
    """Of 16 bits they have their own Inf, zeros and subnormals; each also from an odd address."""
    made = [make() for make in FUSED_VALUES.values()]
    plain = [values[:9000] for values in made if values.layout is torch.strided]
    gradients = [values if values.is_complex() else values.to(dtype) for values in plain]
    gradients += [VALUES[name]().to(dtype)[1:400] for name in ODD]
    gradients += [values for values in made if values.layout is not torch.strided]
    assert_rows(statistics.layers(gradients, 1.0), [expected_row([each]) for each in gradients])


@pytest.mark.usefixtures("no_stock")
def test_groups_of_all_dtypes_are_united(statistics: FusedStatistics) -> None:
    gradients = [make(dtype) for dtype in FUSED_DTYPES for make in list(LAYOUTS.values())[3:7]]
    groups = [gradients[::3], [], gradients[1::3], gradients[2::3]]
    assert_totals(statistics.totals(groups, 1.0), [expected_row(group) for group in groups])
    assert_totals(statistics.totals([], 1.0), [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_measured_with_stock_operations(
    statistics: FusedStatistics, dtype: torch.dtype
) -> None:
    gradients = [normal(100), normal(50).to(dtype)]
    assert_rows(statistics.layers(gradients, 1.0), [expected_row([each]) for each in gradients])
    assert_totals(statistics.totals([gradients], 1.0), [expected_row(gradients)])


@pytest.mark.parametrize(
    "inverse_scale", [2.0**-16, 1 / 3, torch.tensor(2.0**-16), torch.tensor([0.25])], ids=str
)
def test_values_are_divided_by_the_loss_scale(
    statistics: FusedStatistics, inverse_scale: float | torch.Tensor
) -> None:
    gradients = [normal(1000) * 65536, normal(40, 50, dtype=torch.float16)]
    row = by_name(statistics.totals([gradients], inverse_scale)[0])
    expected = totals_of(expected_row(gradients, float(inverse_scale)))
    assert row == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_an_absurd_scale_gives_the_largest_number_and_not_infinity(
    statistics: FusedStatistics,
) -> None:
    assert not statistics.totals([[torch.full((10,), 1e30)]], 1e300).isinf().any()


def test_a_gradient_that_is_none_at_some_steps_keeps_the_tables(
    statistics: FusedStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = [normal(size) for size in (5, 700, 64, 3000)]
    expected = [expected_row([gradient]) for gradient in gradients]
    assert_rows(statistics.layers(gradients, 1.0), expected)
    monkeypatch.setattr(
        "mp_agent.probe.statistics.fused.chunks.make_chunk_tables",
        lambda *_: pytest.fail("the tables were made again"),
    )
    for missing in (0, 3):
        layers = [None if at == missing else each for at, each in enumerate(gradients)]
        rows = [expected_row([]) if at == missing else row for at, row in enumerate(expected)]
        assert_rows(statistics.layers(layers, 1.0), rows)
    moved = [gradient.clone() for gradient in gradients]
    assert_rows(statistics.layers(moved, 1.0), expected)


def test_one_that_was_none_from_the_first_is_measured_once_it_is_there(
    statistics: FusedStatistics,
) -> None:
    gradients = [normal(5), normal(70)]
    for layers in ([None, None], [None, gradients[1]], gradients, [gradients[0], normal(9)]):
        rows = [expected_row([] if each is None else [each]) for each in layers]
        assert_rows(statistics.layers(layers, 1.0), rows)


@pytest.mark.parametrize("dtype", FUSED_DTYPES, ids=str)
def test_replicas_get_equal_bits_wherever_they_lie_in_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ROWS", ROWS)
    statistics = FusedStatistics(CPU, launches)
    gradient = normal(9001, dtype=dtype)
    expected = statistics.layers([gradient], 1.0)
    for offset in (1, 2):
        memory = torch.empty(gradient.numel() + offset, dtype=dtype)
        copy = memory[offset:].copy_(gradient)
        assert torch.equal(statistics.layers([copy], 1.0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_several_blocks_and_chunks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes around the edges of a block of rows, of a pair of them, and of a chunk."""
    monkeypatch.setattr(kernels, "ROWS", 16)
    statistics = FusedStatistics(CPU, launches, chunk_elements=512)
    sizes = [63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513]
    gradients = [normal(size, dtype=dtype, seed=size) for size in sizes]
    gradients += [normal(30, 70, dtype=dtype).t()[:, 3:], normal(9, 200, dtype=dtype)[:, ::3]]
    gradients += [normal(7, 5, 4, 9, dtype=dtype)[:, :3, :, ::2]]
    assert_rows(statistics.layers(gradients, 1.0), [expected_row([each]) for each in gradients])


@settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(gradients_of_any_kind())
def test_any_gradient_agrees_with_the_reference(
    statistics: FusedStatistics, gradient: torch.Tensor
) -> None:
    assert_rows(statistics.layers([gradient], 1.0), [expected_row([gradient])])


def test_gradients_are_only_read_and_need_no_gradient(statistics: FusedStatistics) -> None:
    gradient = normal(1000).requires_grad_()
    version, before = gradient._version, gradient.detach().clone()
    with torch.inference_mode():
        assert_rows(statistics.layers([gradient], 0.5), [expected_row([gradient], 0.5)])
    found = statistics.totals([[gradient * 1.0]], torch.tensor(1.0))
    assert not found.requires_grad
    assert gradient._version == version
    assert torch.equal(gradient.detach(), before)
