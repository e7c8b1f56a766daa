"""What `mp_agent.watch_tensor` costs: one tensor, measured, and the call on all other steps.

Each measurement is compared with the sum of squares of the same tensor in FP32, in turns (ABBA), so
that the ratio holds on a busy machine as well.

    python -m benchmarks.tensor_cost [--device cuda] [--pairs N]
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter

import torch

import mp_agent
from benchmarks.machine import describe, markdown
from mp_agent.probe.instruments.tensors import tensor_row

_HEADER = ("tensor", "sum of squares", "measured", "ratio, median of the pairs")
_SHAPES = ((64, 1024), (8, 512, 8192))
_CALLS = 100_000


def rows(device: torch.device, pairs: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield a line of the table per shape, dtype and kind of call."""
    for shape in _SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.randn(shape, device=device).to(dtype)
            for dim in (None, -1):
                place = None if dim is None else dim % tensor.dim()
                plain, measured = _pairs(
                    partial(_sum_of_squares, tensor),
                    partial(tensor_row, tensor, dim=place, reduction=False),
                    device,
                    pairs,
                )
                ratio = median(b / a for a, b in zip(plain, measured, strict=True))
                name = f"{'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
                name += "" if dim is None else f", dim={dim}"
                yield name, _text(median(plain)), _text(median(measured)), f"{ratio:.1f}"


def _sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().square().sum()


def _pairs(
    one: Callable[[], object], other: Callable[[], object], device: torch.device, pairs: int
) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for which in (0, 1) if pair % 2 else (1, 0):
            start = perf_counter()
            (one, other)[which]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found[which].append(perf_counter() - start)
    return found[0][1:], found[1][1:]


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def idle_seconds() -> float:
    """Return the time of a call of a process that is not watched."""
    tensor = torch.ones(8)
    start = perf_counter()
    for _ in range(_CALLS):
        mp_agent.watch_tensor("tensor", tensor)
    return (perf_counter() - start) / _CALLS


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--pairs", type=int, default=10)
    arguments = parser.parse_args()
    table = markdown(_HEADER, list(rows(arguments.device, arguments.pairs)))
    print(f"{describe(arguments.device)}\n\n{table}")
    print(f"\nA call without `init()`: {idle_seconds() * 1e9:.0f} ns.")


if __name__ == "__main__":
    main()
