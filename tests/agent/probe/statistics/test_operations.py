"""How many operations a measurement has, and that none mixes devices or needs a value."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mp_agent.probe.statistics import packed, packing
from mp_agent.probe.statistics.fused.chunks import scalar_on
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.probe.statistics.packed import PackedStatistics
from tests.agent.probe.statistics.gradients import normal

CPU = torch.device("cpu")

_NO_LAUNCH = frozenset(
    "alias as_strided detach empty expand permute reshape select slice split t unbind unsqueeze "
    "view lift_fresh _reshape_alias".split()
)
"""Operations that only look at memory otherwise, or only get some."""


class Operations(TorchDispatchMode):
    """Counts operations that a device would have to do; a `foreach` counts as one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in _NO_LAUNCH:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> int:
    """Return the operations of a call that is made the second time."""
    call()
    with Operations() as found:
        call()
    total: int = found.counts.total()
    return total


OF_A_BATCH, OF_A_LEVEL, OF_A_TABLE = 16, 6, 30
"""Operations at most for each scratch full of gradients, each level of folding, and each table."""


@pytest.mark.parametrize(
    ("sizes", "batches", "levels"),
    [
        ([100] * 300, 19, 1),
        ([32 * 64] * 3 + [64] * 32, 4, 1),
        ([40 * 32 * 64], 40, 3),
        ([31 * 64, 64] * 20, 20, 1),
    ],
    ids=["small", "large, then small", "large", "large and small in turns"],
)
def test_stock_operations_follow_the_number_of_elements(
    sizes: Sequence[int], batches: int, levels: int
) -> None:
    """A batch fills a scratch of 32 rows of 64; a tensor takes whole rows."""
    statistics = PackedStatistics(CPU, row_elements=64, scratch_rows=32)
    gradients = [normal(size) for size in sizes]
    assert batches == -(-sum(-(-size // 64) for size in sizes) // 32)
    found = operations(lambda: statistics.layers(gradients, 1.0))
    assert found <= batches * OF_A_BATCH + levels * OF_A_LEVEL + OF_A_TABLE


def test_gradients_that_are_none_now_and_then_keep_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    def counted(*arguments: Any) -> packing.PackedLayout:
        made.append(arguments)
        return packing.make_packed_layout(*arguments)

    monkeypatch.setattr(packed, "make_packed_layout", counted)
    statistics = PackedStatistics(CPU, row_elements=64, scratch_rows=32)
    gradients = [normal(100 + number) for number in range(40)]
    for step in range(12):
        statistics.layers(
            [g if number % 7 != step % 7 else None for number, g in enumerate(gradients)], 1.0
        )
    # The second step sees the gradients that were None at the first.
    assert len(made) == 2


def test_batches_of_several_dtypes_are_copied_at_once_each() -> None:
    statistics = PackedStatistics(CPU, row_elements=64, scratch_rows=32)
    gradients = [normal(60, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)] * 32
    with Operations() as found:
        statistics.layers([g for pair in zip(gradients, strict=True) for g in pair], 1.0)
    assert found.counts["_foreach_copy_"] == 2
    assert found.counts["_foreach_zero_"] == 2


class NotedLaunches(SimpleNamespace):
    """Stands for the kernels, which are no operations of torch."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        super().__init__(
            COUNTS=6,
            SUMS=2,
            launch_measure=lambda *_: self.launched.append("measure"),
            launch_edges=lambda *_: self.launched.append("edges"),
            launch_count=lambda *_: self.launched.append("count"),
            launch_fold=lambda *_: self.launched.append("fold"),
        )


@pytest.mark.parametrize("tensors", [1, 300])
def test_the_kernels_need_one_launch_per_dtype_and_hardly_an_operation(tensors: int) -> None:
    launches = NotedLaunches()
    statistics = FusedStatistics(CPU, launches)  # type: ignore[arg-type]
    dtypes = (torch.float32, torch.bfloat16)
    gradients = [normal(5000, dtype=dtype) for dtype in dtypes for _ in range(tensors)]
    scale = torch.tensor(0.5, dtype=torch.float64)
    assert operations(lambda: statistics.layers(gradients, scale)) == 0
    launches.launched.clear()
    assert operations(lambda: statistics.totals([gradients], 0.5)) == 1  # the scale is filled in
    assert launches.launched == ["measure", "measure", "fold"] * 2
    moved = [gradient.clone() for gradient in gradients]
    with Operations() as found:
        statistics.layers(moved, scale)
    assert found.counts == {"_to_copy": 1}  # the addresses


@pytest.mark.parametrize("tensors", [1, 300])
def test_the_distribution_needs_two_launches_more_than_dtypes_and_no_operation(
    tensors: int,
) -> None:
    launches = NotedLaunches()
    statistics = FusedStatistics(CPU, launches, launches)  # type: ignore[arg-type]
    dtypes = (torch.float32, torch.bfloat16)
    gradients = [normal(5000, dtype=dtype) for dtype in dtypes for _ in range(tensors)]
    scale = torch.tensor(0.5, dtype=torch.float64)
    assert operations(lambda: statistics.distribution(gradients, scale, scale)) == 0
    assert launches.launched == ["edges", "count", "count", "fold"] * 2
    assert operations(lambda: statistics.distribution(gradients, 0.5, None)) == 2  # the scales
    statistics.layers(gradients, scale)
    with Operations() as found:
        statistics.distribution(gradients, scale, scale)
    assert found.counts.total() == 0, "the tables and addresses of the layers are there"


OF_A_PIECE = 150
"""Operations at most of the stock distribution of a layer's piece."""


def test_without_kernels_the_distribution_takes_many_operations_per_layer() -> None:
    statistics = PackedStatistics(CPU)
    gradients = [normal(100) for _ in range(5)]
    found = operations(lambda: statistics.distribution(gradients, 0.5, 2.0))
    assert found <= 5 * OF_A_PIECE


class WithoutCudaBuild(TorchFunctionMode):
    """Does on fake tensors of a GPU what this build of torch looks for a CUDA guard for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _item(*args)
        if func is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not.default(*args)
        if func is torch.Tensor.copy_:
            torch.ops.aten.copy.default(*args[:2])
            return args[0]
        if func in (torch._foreach_copy_, torch._foreach_zero_):
            for pair in zip(*args, strict=True):
                assert len({(each.shape, each.device) for each in pair}) == 1
            return None
        return func(*args, **(kwargs or {}))


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    aten = torch.ops.aten
    dim = 0
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, int):
            tensor = aten.select.int(tensor, dim, each)
        elif isinstance(each, torch.Tensor):
            tensor = aten.index.Tensor(tensor, [None] * dim + [each])
            dim += 1
        else:
            end = 2**63 - 1 if each.stop is None else each.stop
            tensor = aten.slice.Tensor(tensor, dim, each.start or 0, end, each.step or 1)
            dim += 1
    return tensor


@pytest.fixture
def fake_gpu() -> Iterator[None]:
    """Tensors without values on a GPU that is not there: a mix of devices and `item` raise."""

    def send(values, device):
        return torch.from_numpy(values).to(device)

    with (
        patch("mp_agent.probe.statistics.packing.send", send),
        FakeTensorMode(allow_non_fake_inputs=True),
        WithoutCudaBuild(),
    ):
        yield


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str
)
def test_stock_operations_stay_on_their_device_and_need_no_value(dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    gradients = [torch.empty(shape, dtype=dtype, device=device) for shape in ((700,), (30, 40))]
    statistics = PackedStatistics(device, row_elements=64, scratch_rows=32)
    inverse_scale = torch.empty((), device=device)
    for found in (
        statistics.layers([*gradients, None], inverse_scale),
        statistics.totals([gradients, []], inverse_scale),
        statistics.totals([gradients], 0.5),
        statistics.distribution([*gradients, None], inverse_scale, inverse_scale),
        statistics.distribution(gradients, 0.5, None),
    ):
        assert found.device == device
        assert found.dtype is torch.float64
    assert statistics.digests(gradients).device == device


@pytest.mark.usefixtures("fake_gpu")
def test_a_scale_on_another_gpu_would_be_noticed() -> None:
    """Shows that the fake device sees a mix; where the scale comes from sends it over."""
    device = torch.device("cuda", 0)
    statistics = PackedStatistics(device, row_elements=64, scratch_rows=32)
    gradients = [torch.empty(700, device=device)]
    with pytest.raises(RuntimeError, match="device"):
        statistics.layers(gradients, torch.empty(3, device="cuda:1"))


@pytest.mark.usefixtures("fake_gpu")
def test_the_distribution_brings_its_scales_to_the_gradients() -> None:
    device = torch.device("cuda", 0)
    elsewhere = torch.empty((), device="cuda:1")
    found = PackedStatistics(device).distribution(
        [torch.empty(700, device=device)], elsewhere, elsewhere
    )
    assert found.device == device
    assert scalar_on(device, elsewhere).device == device
    assert scalar_on(device, 0.5).dtype is torch.float64
