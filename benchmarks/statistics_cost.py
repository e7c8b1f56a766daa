"""What the gradient statistics cost, as a multiple of `torch.nn.utils.get_total_norm`.

Both run on the same tensors in the same process, turn by turn; a ratio is the median over the
turns, so that whatever else the machine does meets both alike.

    python -m benchmarks.statistics_cost [--threads N] [--device cuda] [--turns N] [--json]
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch
from torch.nn.utils import get_total_norm

from benchmarks.machine import describe, markdown
from mp_agent.probe.statistics import for_device

LARGE_ELEMENTS = 100_000_000

HEADER = (
    "gradients",
    "get_total_norm",
    "totals",
    "ratio",
    "layers",
    "ratio",
    "host part of totals",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Gradients to measure, made on a device."""

    name: str
    make: Callable[[torch.device], list[torch.Tensor]]
    turns_factor: int = 1
    """How many times more turns than a large case needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Medians over the turns of one case."""

    case: str
    norm_seconds: float
    totals_seconds: float
    totals_ratio: float
    layers_seconds: float
    layers_ratio: float
    totals_host_seconds: float
    """Until `totals` returned; on the CPU that is all of it."""

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table, below `HEADER`."""
        return (
            self.case,
            f"{self.norm_seconds * 1e3:.2f} ms",
            f"{self.totals_seconds * 1e3:.2f} ms",
            f"**{self.totals_ratio:.2f}**",
            f"{self.layers_seconds * 1e3:.2f} ms",
            f"{self.layers_ratio:.2f}",
            f"{self.totals_host_seconds * 1e3:.2f} ms",
        )


def _small(*shape: int) -> Callable[[torch.device], list[torch.Tensor]]:
    return lambda device: [torch.randn(shape, device=device) * 1e-3 for _ in range(200)]


def _large(
    parts: int, dtype: torch.dtype = torch.float32, zero_share: float = 0.0
) -> Callable[[torch.device], list[torch.Tensor]]:
    def make(device: torch.device) -> list[torch.Tensor]:
        gradient = torch.randn(LARGE_ELEMENTS, device=device).mul_(1e-3)
        for part in gradient.split(1_000_000):  # type: ignore[no-untyped-call]
            part[: int(part.numel() * zero_share)] = 0.0
        return list(gradient.to(dtype).split(LARGE_ELEMENTS // parts))  # type: ignore[no-untyped-call]

    return make


def _scattered_zeros(device: torch.device) -> list[torch.Tensor]:
    gradient = torch.randn(LARGE_ELEMENTS, device=device).mul_(1e-3)
    gradient[::100] = 0.0
    return [gradient]


CASES = (
    Case("200 vectors of 1024", _small(1024), turns_factor=20),
    Case("200 matrices of 32 x 32", _small(32, 32), turns_factor=20),
    Case("100 M elements in 1 tensor", _large(1)),
    Case("100 M elements in 100 tensors", _large(100)),
    Case("100 M elements, half of them zero", _large(1, zero_share=0.5)),
    Case("100 M elements, every 100th zero", _scattered_zeros),
    Case("100 M elements, BF16", _large(1, torch.bfloat16)),
    Case("100 M elements, FP16", _large(1, torch.float16)),
)


def measure(case: Case, device: torch.device, turns: int) -> Cost:
    """Return what `case` costs on `device`; the first turn warms up and does not count."""
    gradients = case.make(device)
    statistics = for_device(device)
    norm, totals, layers, host = [], [], [], []
    for _ in range(turns * case.turns_factor + 1):
        norm.append(_seconds(lambda: get_total_norm(gradients), device)[0])
        whole, until_return = _seconds(lambda: statistics.totals([gradients], 1.0), device)
        totals.append(whole)
        host.append(until_return)
        layers.append(_seconds(lambda: statistics.layers(gradients, 1.0), device)[0])
    return Cost(
        case=case.name,
        norm_seconds=median(norm[1:]),
        totals_seconds=median(totals[1:]),
        totals_ratio=_median_ratio(totals[1:], norm[1:]),
        layers_seconds=median(layers[1:]),
        layers_ratio=_median_ratio(layers[1:], norm[1:]),
        totals_host_seconds=median(host[1:]),
    )


def _median_ratio(costs: list[float], baselines: list[float]) -> float:
    return median(cost / baseline for cost, baseline in zip(costs, baselines, strict=True))


def _seconds(function: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Return the time until the device has finished, and until the call returned."""
    _finish(device)
    start = perf_counter()
    function()
    returned = perf_counter()
    _finish(device)
    return perf_counter() - start, returned - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(costs: list[Cost], device: torch.device) -> str:
    """Return the costs with the machine's description, as Markdown."""
    return f"{describe(device)}\n\n{markdown(HEADER, (cost.cells() for cost in costs))}"


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1, help="as torchrun sets it: 1")
    parser.add_argument("--turns", type=int, default=9, help="of a large case")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    costs = [measure(case, arguments.device, arguments.turns) for case in CASES]
    if arguments.json:
        machine = describe(arguments.device)
        print(json.dumps({"machine": machine, "costs": [asdict(cost) for cost in costs]}, indent=2))
    else:
        print(table(costs, arguments.device))


if __name__ == "__main__":
    main()
