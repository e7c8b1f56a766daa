"""How fast gradients are read for their statistics, compared with a copy on the same device.

Statistics read each element once at best, a copy reads and writes it. Both run on the same tensor,
turn by turn, timed by the device where it is a GPU; a share is the median over the turns of the
statistics' bytes per second to the copy's. 85 % is what we aim at for FP32 on a GPU.

    python -m benchmarks.device_bandwidth [--device cuda] [--elements N] [--turns N]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from benchmarks.machine import describe, markdown
from benchmarks.step_overhead import interval
from benchmarks.targets import Target, verdict
from mp_agent.probe.statistics import GradientStatistics, for_device
from mp_agent.probe.statistics.fused.statistics import FusedStatistics
from mp_agent.probe.statistics.packed import PackedStatistics

ELEMENTS = 100_000_000
_BUSY_CYCLES = 20_000_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHARE_AT_LEAST = 0.85
TARGET = "the kernels' reading of FP32 gradients, of a copy's bytes per second"
LIMIT = f"at least {SHARE_AT_LEAST:.0%}"
HEADER = ("gradients", "copy", "statistics", "share of the copy", "stock operations", "share")


def seconds_on(device: torch.device, function: Callable[[], object]) -> float:
    """Return how long the device is at work on what `function` starts."""
    if device.type != "cuda":
        start = perf_counter()
        function()
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # While the device is kept busy the host queues all: its own time is not to be measured.
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of each turn."""

    gradients: str
    ways: dict[str, str]
    """What measures, by name of the way."""
    copies: list[float]
    reads: dict[str, list[float]]

    def shares(self, name: str) -> list[float]:
        """Return the shares of the copy's that the reads of one way come to."""
        return [rate / copy for rate, copy in zip(self.reads[name], self.copies, strict=True)]

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table, below `HEADER`."""
        cells = [self.gradients, f"{median(self.copies) / 1e9:.1f} GB/s"]
        for name, rates in self.reads.items():
            cells += [f"{median(rates) / 1e9:.1f} GB/s", f"**{median(self.shares(name)):.0%}**"]
        return tuple(cells)

    def target(self) -> Target:
        """Return whether the kernels read as fast as is aimed at."""
        shares = self.shares("statistics")
        low, high = interval(shares)
        result = verdict(lambda share: share >= SHARE_AT_LEAST, low, high)
        if self.ways["statistics"] != FusedStatistics.__name__:
            result = f"not measured: {self.ways['statistics']} instead of the kernels"
        return Target(TARGET, LIMIT, f"{median(shares):.1%}", f"{low:.1%} to {high:.1%}", result)


def measure(device: torch.device, elements: int, dtype: torch.dtype, turns: int) -> Rates:
    """Return the rates of each way; the first turn warms up and does not count."""
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
    return Rates(
        f"{elements / 1e6:.0f} M elements, {str(dtype).removeprefix('torch.')}",
        {name: type(way).__name__ for name, way in ways.items()},
        copies[1:],
        {name: rates[1:] for name, rates in reads.items()},
    )


def table(device: torch.device, rates: Sequence[Rates]) -> str:
    """Return the measurements with the machine's description, as Markdown."""
    return f"{describe(device)}\n\n{markdown(HEADER, (each.cells() for each in rates))}"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    device, elements, turns = arguments.device, arguments.elements, arguments.turns
    print(table(device, [measure(device, elements, dtype, turns) for dtype in DTYPES]))


if __name__ == "__main__":
    main()
