"""Tensors at the edges of what can be measured, by what is odd about them."""

from math import inf, nan

import torch


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


ODD_TENSORS = {
    "float32": random(13, 7),
    "float64": random(9, dtype=torch.float64),
    "bfloat16": random(40, dtype=torch.bfloat16),
    "float16 at its limits": torch.tensor(
        [65504.0, -65504.0, 60000.0, 60032.0, 6e-8, -0.0, 1.0], dtype=torch.float16
    ),
    "large in float32": torch.tensor([65504.0, 65520.0, -1e30, 1.0]),
    "subnormal": torch.tensor([1e-40, -1e-45, 0.0]),
    "subnormal float16": torch.tensor([6e-8, 1.2e-7, 6e-8], dtype=torch.float16),
    "zeros of both signs": torch.tensor([0.0, -0.0, -0.0]),
    "one element": torch.tensor([-3.5]),
    "no dimension": torch.tensor(-3.5),
    "NaN and Inf": torch.tensor([nan, inf, -inf, 2.0, -4.0, 0.0]),
    "Inf that cancels": torch.tensor([inf, -inf]),
    "all NaN": torch.full((5,), nan),
    "float64 beyond": torch.tensor([1e308, -1e308, 1e-308], dtype=torch.float64),
    "float64 subnormal": torch.tensor([5e-324, 0.0], dtype=torch.float64),
    "strided": random(6, 10)[::2, 1::3],
    "expanded": random(4, 1).expand(4, 3),
    "complex": torch.complex(random(5), torch.tensor([0.0, nan, inf, 1.0, -1.0])),
    "of several chunks": torch.cat([random(300), torch.tensor([nan, 3e38]), random(300)]),
}
