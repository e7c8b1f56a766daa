"""Gradients of every kind that training produces, named, for tests on any device."""

from collections.abc import Callable

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normally distributed values, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _with(base: torch.Tensor, **values_at: float) -> torch.Tensor:
    for number, value in enumerate(values_at.values()):
        base.view(-1)[number * 7] = value
    return base


NAN, INF = float("nan"), float("inf")

LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "vector": lambda dtype: normal(1000, dtype=dtype),
    "matrix": lambda dtype: normal(30, 40, dtype=dtype),
    "scalar": lambda dtype: normal(1, dtype=dtype)[0],
    "empty": lambda dtype: normal(0, 5, dtype=dtype),
    "transposed": lambda dtype: normal(30, 40, dtype=dtype).t(),
    "channels_last": lambda dtype: normal(2, 3, 4, 5, dtype=dtype).to(
        memory_format=torch.channels_last
    ),
    "transposed_around_one": lambda dtype: normal(1200, dtype=dtype).as_strided(
        (40, 1, 30), (1, 7, 40)
    ),
    "every_second": lambda dtype: normal(300, 8, dtype=dtype)[:, ::2],
    "misaligned": lambda dtype: normal(1001, dtype=dtype)[1:],
    "expanded": lambda dtype: normal(5, dtype=dtype).expand(300, 5),
    "expanded_scalar": lambda dtype: normal(1, dtype=dtype)[0].expand(700),
    "large_transposed": lambda dtype: normal(300, 700, dtype=dtype).t(),
    "large_gaps": lambda dtype: normal(300, 700, dtype=dtype)[:, :650],
    "one_long_row_with_gaps": lambda dtype: normal(1, 300_000, dtype=dtype)[:, ::2],
    "chunk_minus_one": lambda dtype: normal(65_535, dtype=dtype),
    "chunk": lambda dtype: normal(65_536, dtype=dtype),
    "chunk_plus_one": lambda dtype: normal(65_537, dtype=dtype),
    "three_chunks": lambda dtype: normal(3, 65_536, dtype=dtype),
}

VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(500),
    "negative_zeros": lambda: -torch.zeros(500),
    "some_zeros": lambda: normal(70_000).relu(),
    "mostly_zero_rows": lambda: normal(200, 500) * (torch.arange(200) % 50 == 0).unsqueeze(1),
    "all_nan": lambda: torch.full((70_000,), NAN),
    "negative_nan": lambda: -torch.full((500,), NAN),
    "all_inf": lambda: torch.full((70_000,), -INF),
    "one_nan": lambda: _with(normal(70_000), nan=NAN),
    "one_inf": lambda: _with(normal(70_000), inf=INF),
    "everything": lambda: _with(normal(70_000), a=NAN, b=INF, c=-INF, d=0.0, e=-0.0, f=1e30),
    "inf_and_zeros": lambda: _with(torch.zeros(500), inf=INF),
    "nan_among_tiny": lambda: _with(torch.full((500,), 1e-24), nan=NAN),
    "huge": lambda: normal(70_000) * 1e20,
    "largest": lambda: torch.full((70_000,), torch.finfo(torch.float32).max),
    "tiny": lambda: normal(70_000) * 1e-24,
    "subnormal": lambda: torch.full((500,), 1e-45),
    "some_subnormal": lambda: _with(normal(500), a=1e-45, b=-1e-40),
    "subnormal_and_zeros": lambda: _with(torch.zeros(500), a=1e-45, b=-1e-40),
    "huge_and_tiny": lambda: _with(torch.full((70_000,), 1e-24), a=1e20, b=-1e20),
    "huge_chunk_then_tiny_chunk": lambda: torch.cat(
        (torch.full((65_536,), 1e20), torch.full((65_536,), 1e-24))
    ),
    "equal": lambda: torch.full((300_000,), 0.1),
    "float64_huge": lambda: normal(500, dtype=torch.float64) * 1e150,
    "float64_tiny": lambda: normal(500, dtype=torch.float64) * 1e-150,
    "float64_beyond": lambda: torch.full((500,), 1e200, dtype=torch.float64),
    "complex": lambda: torch.complex(normal(300), normal(300, seed=1)),
    "complex_conjugated": lambda: torch.complex(normal(300), normal(300, seed=1)).conj(),
    "sparse_uncoalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), normal(3, 4), (5, 4), check_invariants=True
    ),
}
