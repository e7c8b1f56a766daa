"""Both implementations against an independent float64 reference."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.probe.statistics import GradientStatistics, for_device, pieces
from mp_agent.probe.statistics.host import CpuStatistics
from mp_agent.probe.statistics.host_chunk import TALLY_COLUMNS, Tally
from mp_agent.probe.statistics.packed import PackedStatistics
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENT_COLUMNS, Tier
from tests.agent.probe.statistics.gradients import DTYPES, LAYOUTS, VALUES, normal
from tests.agent.probe.statistics.reference import (
    assert_rows,
    assert_totals,
    by_name,
    expected_row,
    totals_of,
)

pytestmark = pytest.mark.filterwarnings("error")

CPU = torch.device("cpu")

IMPLEMENTATIONS: dict[str, Callable[[], GradientStatistics]] = {
    "cpu": CpuStatistics,
    "packed": lambda: PackedStatistics(CPU),
    "packed_small": lambda: PackedStatistics(CPU, row_elements=64, scratch_rows=32),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tests on a busy machine would else mostly wait for threads to wake."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def statistics(request: pytest.FixtureRequest) -> GradientStatistics:
    return IMPLEMENTATIONS[request.param]()


def test_a_tally_has_the_columns_by_name() -> None:
    assert set(TALLY_COLUMNS) == set(GRADIENT_COLUMN_NAMES)
    assert len(Tally().values()) == len(TALLY_COLUMNS)


def test_a_sampled_column_is_measured_of_layers_alone(
    statistics: GradientStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = tuple(
        replace(column, tier=Tier.SAMPLED) if column.name == "abs_max" else column
        for column in GRADIENT_COLUMNS
    )
    monkeypatch.setattr(pieces, "GRADIENT_COLUMNS", columns)
    gradient = normal(1000)
    expected = expected_row([gradient])
    assert_totals(statistics.totals([[gradient]], 1.0), [{**expected, "abs_max": np.nan}])
    assert_rows(statistics.layers([gradient], 1.0), [expected])


def test_the_cpu_gets_the_chunked_and_an_accelerator_the_packed_statistics() -> None:
    assert isinstance(for_device(CPU), CpuStatistics)
    assert isinstance(for_device(torch.device("cuda", 0)), PackedStatistics)


def assert_measured(statistics: GradientStatistics, gradient: torch.Tensor) -> None:
    expected = [expected_row([gradient])]
    assert_totals(statistics.totals([[gradient]], 1.0), expected)
    assert_rows(statistics.layers([gradient], 1.0), expected)


def test_every_dtype_and_layout_agrees_with_the_reference(
    statistics: GradientStatistics, subtests: pytest.Subtests
) -> None:
    for layout, dtype in product(LAYOUTS, DTYPES):
        with subtests.test(f"{layout}, {dtype}"):
            assert_measured(statistics, LAYOUTS[layout](dtype))


def test_special_values_are_counted_and_never_spoil_the_rest(
    statistics: GradientStatistics, subtests: pytest.Subtests
) -> None:
    for values, make in VALUES.items():
        with subtests.test(values):
            assert_measured(statistics, make())


@pytest.mark.slow
def test_groups_and_layers_of_all_gradients_together(statistics: GradientStatistics) -> None:
    gradients = [make() for make in VALUES.values()]
    gradients += [make(dtype) for make in LAYOUTS.values() for dtype in DTYPES]
    groups = [gradients[::3], [], gradients[1::3], gradients[2::3]]
    assert_totals(statistics.totals(groups, 1.0), [expected_row(group) for group in groups])
    layers = [None, *gradients, None]
    expected = [expected_row([] if layer is None else [layer]) for layer in layers]
    assert_rows(statistics.layers(layers, 1.0), expected)


@pytest.mark.slow
def test_layers_that_are_none_now_and_then_leave_the_others_right(
    statistics: GradientStatistics,
) -> None:
    """As of a mixture of experts, of which each step reaches others."""
    layers = [*(make() for make in VALUES.values()), normal(20_000, dtype=torch.bfloat16)]
    for step in range(4):
        reached = [None if (number + step) % 3 == 0 else g for number, g in enumerate(layers)]
        expected = [expected_row([] if layer is None else [layer]) for layer in reached]
        assert_rows(statistics.layers(reached, 1.0), expected)


def test_many_small_tensors_are_all_measured(statistics: GradientStatistics) -> None:
    tensors = [normal(1 + 37 * number % 9000, seed=number) for number in range(300)]
    groups = [tensors[:200], tensors[200:]]
    assert_totals(statistics.totals(groups, 1.0), [expected_row(group) for group in groups])


@pytest.mark.parametrize("shape", [(1,), (40,), (8, 5), (700,), (8192,)], ids=str)
def test_layers_of_one_shape_are_told_apart_whatever_is_in_them(
    statistics: GradientStatistics, shape: tuple[int, ...], subtests: pytest.Subtests
) -> None:
    """So many that they do not fit next to each other, and every kind of value among them."""
    count = int(np.prod(shape))
    odd = [values for make in VALUES.values() if not (values := make()).is_complex()]
    seeds = range(70_000 // count % 40 + 9)
    for dtype in DTYPES:
        with subtests.test(str(dtype)):
            layers = [
                values.to(dtype).ravel()[:count].clone().view(shape)
                for values in odd
                if values.layout is torch.strided and values.numel() >= count
            ]
            layers += [normal(*shape, dtype=dtype, seed=seed) for seed in seeds]
            assert_rows(statistics.layers(layers, 1.0), [expected_row([each]) for each in layers])


def test_nothing_to_measure_gives_a_table_without_rows(statistics: GradientStatistics) -> None:
    assert_totals(statistics.totals([], 1.0), [])
    assert_rows(statistics.layers([], 1.0), [])


@pytest.mark.parametrize(
    "inverse_scale", [2.0**-16, 1 / 3, torch.tensor(2.0**-16), torch.tensor([0.25])], ids=str
)
def test_values_are_divided_by_the_loss_scale(
    statistics: GradientStatistics, inverse_scale: float | torch.Tensor
) -> None:
    gradients = [normal(1000) * 65536, normal(40, 50, dtype=torch.float16)]
    expected = expected_row(gradients, float(inverse_scale))
    row = by_name(statistics.totals([gradients], inverse_scale)[0])
    assert row == pytest.approx(totals_of(expected), rel=1e-6, nan_ok=True)


def test_an_absurd_scale_gives_the_largest_number_and_not_infinity(
    statistics: GradientStatistics,
) -> None:
    row = statistics.totals([[torch.full((10,), 1e300, dtype=torch.float64)]], 1e300)
    assert not torch.isinf(row).any()


ELEMENTS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 1e20, 1e-24, 1e-45, 65504.0]),
)


@st.composite
def gradients_of_any_kind(draw: st.DrawFn) -> torch.Tensor:
    pattern = draw(st.lists(ELEMENTS, min_size=1, max_size=12))
    shape = draw(st.lists(st.integers(0, 40), max_size=3))
    count = int(np.prod(shape, dtype=int))
    dtype = draw(st.sampled_from(DTYPES))
    gradient = torch.tensor(pattern, dtype=torch.float64).to(dtype)
    gradient = gradient.repeat(count // len(pattern) + 1)[:count].reshape(shape)
    return gradient.t() if gradient.dim() == 2 and draw(st.booleans()) else gradient


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.lists(gradients_of_any_kind(), max_size=6))
def test_any_gradients_agree_with_the_reference(gradients: list[torch.Tensor]) -> None:
    expected = [expected_row([gradient]) for gradient in gradients]
    for make in (CpuStatistics, IMPLEMENTATIONS["packed_small"]):
        assert_rows(make().layers(gradients, 1.0), expected)
        assert_totals(make().totals([gradients], 1.0), [expected_row(gradients)])


@settings(deadline=None, max_examples=60)
@given(st.floats(min_value=1.0, max_value=2.0, width=32), st.integers(1, 200_000))
def test_equal_elements_add_up_without_drift(element: float, count: int) -> None:
    (row,) = CpuStatistics().layers([torch.full((count,), -element)], 1.0)
    assert by_name(row)["sum_squares"] == pytest.approx(element * element * count, rel=1e-6)
    assert by_name(row)["abs_sum"] == pytest.approx(element * count, rel=1e-6)


def test_the_largest_magnitude_is_exact_for_every_float32_mantissa() -> None:
    mantissas = torch.arange(1 << 23, 1 << 24, 997, dtype=torch.float32).split(1)
    table = CpuStatistics().layers(mantissas, 1.0)
    assert [by_name(row)["abs_max"] for row in table] == [mantissa.item() for mantissa in mantissas]


def test_gradients_are_only_read(statistics: GradientStatistics) -> None:
    gradients = [make() for make in VALUES.values() if make().layout is torch.strided]
    before = [gradient.clone() for gradient in gradients]
    versions = [gradient._version for gradient in gradients]
    statistics.totals([gradients], 0.5)
    statistics.layers(gradients, 0.5)
    assert [gradient._version for gradient in gradients] == versions
    for gradient, copy in zip(gradients, before, strict=True):
        torch.testing.assert_close(gradient, copy, rtol=0.0, atol=0.0, equal_nan=True)


def test_autograd_autocast_and_inference_mode_make_no_difference() -> None:
    for make in IMPLEMENTATIONS.values():
        statistics = make()
        gradients = [normal(300, 400).requires_grad_(), normal(50).requires_grad_()]
        expected = [expected_row(gradients)]
        with torch.inference_mode():
            assert_totals(statistics.totals([gradients], 1.0), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_totals(statistics.totals([gradients], 1.0), expected)
        products = [gradient * 1.0 for gradient in gradients]
        for found in (statistics.totals([products], 1.0), statistics.layers(products, 1.0)):
            assert not found.requires_grad
        assert_totals(statistics.totals([products], 1.0), expected)


def test_the_default_dtype_and_thread_count_are_left_alone(statistics: GradientStatistics) -> None:
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        assert_totals(statistics.totals([[normal(500)]], 1.0), [expected_row([normal(500)])])
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.get_num_threads() == threads


def test_replicas_get_equal_bits_wherever_they_lie_in_memory(
    statistics: GradientStatistics,
) -> None:
    gradients = [normal(1000), normal(100_000), normal(300, 300)]
    for offset in range(1, 17, 3):
        copies = [_copy_at(gradient, offset) for gradient in gradients]
        assert_same(statistics.totals([gradients], 1.0), statistics.totals([copies], 1.0))
        assert torch.equal(statistics.layers(gradients, 1.0), statistics.layers(copies, 1.0))


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def _copy_at(gradient: torch.Tensor, offset: int) -> torch.Tensor:
    memory = torch.empty(gradient.numel() + offset)
    return memory[offset:].view(gradient.shape).copy_(gradient)


class _Watch(TorchDispatchMode):
    """Records each operation and the size of the largest storage that is not the gradients'."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        self.largest_bytes = 0
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.operations.add(func.overloadpacket.__name__)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self.largest_bytes = max(self.largest_bytes, storage.nbytes())
        return results


@pytest.mark.parametrize(
    "gradient",
    [normal(5_000_000), normal(2500, 2000).t(), normal(2500, 2100)[:, :2000], VALUES["all_nan"]()],
    ids=["contiguous", "transposed", "gaps", "nan"],
)
def test_no_temporary_is_larger_than_the_scratch(gradient: torch.Tensor) -> None:
    for make, bound_bytes in (
        (CpuStatistics, 128 * 1024 * 4),
        (lambda: PackedStatistics(CPU, row_elements=1024, scratch_rows=64), 64 * 1024 * 8),
    ):
        with _Watch([gradient]) as watch:
            make().totals([[gradient]], 1.0)
            make().layers([gradient], 1.0)
        assert 0 < watch.largest_bytes <= bound_bytes


def test_the_packed_statistics_never_ask_the_device_for_a_value() -> None:
    gradients = [make() for name, make in VALUES.items() if make().layout is torch.strided]
    with _Watch(gradients) as watch:
        statistics = PackedStatistics(CPU)
        statistics.totals([gradients], torch.tensor(0.5))
        statistics.layers([*gradients, None], torch.tensor(0.5))
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "equal"}
    assert not watch.operations & waiting


def test_a_changing_set_of_gradients_is_measured_right_each_time() -> None:
    statistics = PackedStatistics(CPU, row_elements=64, scratch_rows=32)
    gradients = [normal(size) for size in (5, 700, 64, 3000)]
    for missing in [*range(4)] * 3:
        layers = [None if at == missing else gradient for at, gradient in enumerate(gradients)]
        expected = [expected_row([] if layer is None else [layer]) for layer in layers]
        assert_rows(statistics.layers(layers, 1.0), expected)
    for count in range(1, 20):
        gradient = normal(count)
        assert_rows(statistics.layers([gradient], 1.0), [expected_row([gradient])])


@pytest.mark.slow
def test_a_hundred_million_elements_agree_to_a_millionth() -> None:
    gradient = torch.empty(100_000_000).normal_(generator=torch.Generator().manual_seed(1))
    values = gradient.numpy()
    parts = [part.astype(np.float64) for part in np.array_split(values, 100)]
    sum_squares = sum(float(np.square(part).sum()) for part in parts)
    abs_sum = sum(float(np.abs(part).sum()) for part in parts)
    for make in (CpuStatistics, lambda: PackedStatistics(CPU)):
        row = by_name(make().layers([gradient], 1.0)[0])
        assert row["sum_squares"] == pytest.approx(sum_squares, rel=1e-6)
        assert row["abs_sum"] == pytest.approx(abs_sum, rel=1e-6)
        assert row["abs_max"] == float(np.abs(values).max())
        assert row["elements"] == 100_000_000
