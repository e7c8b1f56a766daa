"""Launches the kernels by a driver that only notes launches; run by `test_launches`.

Compiles for a GPU that is not there, by the same way that a rank takes: prints as JSON how often
something was compiled before and after the first launches, and the grids of those after.
"""

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from mp_agent.probe.statistics.fused import distribution_kernels, launches
from mp_agent.probe.statistics.fused.statistics import FusedStatistics

SHARED_MEMORY_BYTES = 200_000


class NotingDriver:
    """What Triton asks of a driver, answered for one sm_90 that loads and launches nothing."""

    def __init__(self) -> None:
        self.grids: list[int] = []
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 2, 32, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda _: {"max_shared_mem": SHARED_MEMORY_BYTES},
        )

    def launcher_cls(self, *_: Any) -> Any:
        return lambda grid, *_: self.grids.append(grid)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def main() -> None:
    compilations: list[object] = []
    triton.knobs.compilation.listener = lambda **_: compilations.append(None)
    noting = NotingDriver()
    driver.set_active(noting)
    for module in (launches, distribution_kernels):
        module.compile_all()
    ahead = len(compilations)
    for module in (launches, distribution_kernels):
        module.launch_once(torch.device("cpu"))
    first = len(compilations) - ahead
    noting.grids.clear()
    statistics = FusedStatistics(torch.device("cpu"), launches, distribution_kernels)
    memory = torch.zeros(1_000_000)
    for size in (1, 2, 16, 17, 70_000, 300_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for offset in (0, 1):
                gradient = memory.to(dtype)[offset : offset + size]
                statistics.layers([gradient, None], 0.5)
                statistics.totals([[gradient, gradient]], torch.tensor(1.0))
                statistics.distribution([gradient, None], 0.5, torch.tensor(2.0))
    later = len(compilations) - ahead - first
    print(json.dumps({"ahead": ahead, "first": first, "later": later, "grids": noting.grids}))


if __name__ == "__main__":
    main()
