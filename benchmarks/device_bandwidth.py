"""How fast gradients are read for their statistics, compared with a copy on the same device.

Statistics read each element once at best, a copy reads and writes it. Both run on the same tensor,
turn by turn, timed by the device where it is a GPU; a share is the median over the turns of the
statistics' bytes per second to the copy's. 85 % is what we aim at for FP32 on a GPU.

    python -m benchmarks.device_bandwidth [--device cuda] [--elements N] [--turns N]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from benchmarks.machine import describe, markdown
from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.statistics.packed.statistics import PackedStatistics

ELEMENTS = 100_000_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADER = ("gradients", "copy", "statistics", "share of the copy", "stock operations", "share")


def seconds_on(device: torch.device, function: Callable[[], object]) -> float:
    """Return how long the device is at work on what `function` starts."""
    if device.type != "cuda":
        start = perf_counter()
        function()
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes per second of each turn: of a copy, which reads and writes, and of the statistics."""

    elements: int
    dtype: torch.dtype
    copy: list[float]
    statistics: list[float]
    """With the kernels, where they are."""
    stock: list[float]
    """With stock operations."""

    @property
    def share(self) -> float:
        """Median over the turns of the statistics' rate to the copy's."""
        return _share(self.statistics, self.copy)

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table, below `HEADER`."""
        cells = [f"{self.elements / 1e6:.0f} M elements, {str(self.dtype).removeprefix('torch.')}"]
        cells.append(f"{median(self.copy) / 1e9:.1f} GB/s")
        for rates in (self.statistics, self.stock):
            share = _share(rates, self.copy)
            cells += [f"{median(rates) / 1e9:.1f} GB/s", f"**{share:.0%}**"]
        return tuple(cells)


def _share(rates: list[float], copy: list[float]) -> float:
    return median(rate / base for rate, base in zip(rates, copy, strict=True))


def measure(device: torch.device, elements: int, dtype: torch.dtype, turns: int) -> Bandwidth:
    """Measure one dtype; the first turn warms up and does not count."""
    gradient = torch.randn(elements, device=device).to(dtype)
    target = torch.empty_like(gradient)
    ways: dict[str, GradientStatistics] = {
        "statistics": for_device(device),
        "stock": PackedStatistics(device),
    }
    copies: list[float] = []
    reads: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns + 1):
        copied = seconds_on(device, lambda: target.copy_(gradient))
        copies.append(2 * gradient.nbytes / copied)
        for name, way in ways.items():
            taken = seconds_on(device, lambda way=way: way.totals([[gradient]], 1.0))  # type: ignore[misc]
            reads[name].append(gradient.nbytes / taken)
    return Bandwidth(
        elements=elements,
        dtype=dtype,
        copy=copies[1:],
        statistics=reads["statistics"][1:],
        stock=reads["stock"][1:],
    )


def measure_all(device: torch.device, elements: int, turns: int) -> list[Bandwidth]:
    """Measure all dtypes."""
    return [measure(device, elements, dtype, turns) for dtype in DTYPES]


def table(measured: list[Bandwidth], device: torch.device) -> str:
    """Return the measurements with the machine's description, as Markdown."""
    return f"{describe(device)}\n\n{markdown(HEADER, (each.cells() for each in measured))}"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    measured = measure_all(arguments.device, arguments.elements, arguments.turns)
    print(table(measured, arguments.device))


if __name__ == "__main__":
    main()
