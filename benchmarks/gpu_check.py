"""Numerics, host syncs and cost on a CUDA machine, in one report: `make gpu-check`.

Exits with the status of the tests; without CUDA it says why it has nothing to do, and exits 0.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import device_bandwidth, gradient_loggers, statistics_cost, step_overhead
from benchmarks.training import GPT2_MEDIUM, SMALL, make_training

TURNS = 20


def main() -> int:
    """Run tests/gpu, then the benchmarks, and print all.

    By path, and without the settings of the other tests: a machine with a GPU may have no more
    than torch, pytest and what mp_agent itself needs.
    """
    if not torch.cuda.is_available():
        print(f"Nothing to check: torch {torch.__version__} finds no CUDA device on this machine.")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    command = (sys.executable, "-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu", "-q", "-rs")
    tests = subprocess.run(command, check=False, capture_output=True, text=True)
    print(tests.stdout if tests.returncode else "")
    verdict = tests.stdout.strip().rpartition("\n")[2].strip("= ")
    print(f"tests/gpu (numerics, no host sync, crashes): {verdict}\n")
    costs = [statistics_cost.measure(case, device, TURNS) for case in statistics_cost.CASES]
    print(f"{statistics_cost.table(costs, device)}\n")
    print(f"{device_bandwidth.table(device, device_bandwidth.ELEMENTS, TURNS)}\n")
    print(f"{step_overhead.table(make_training(device, SMALL), device, TURNS)}\n")
    for precision in (torch.bfloat16, torch.float16):
        training = make_training(device, GPT2_MEDIUM, precision)
        print(f"{step_overhead.table(training, device, TURNS)}\n")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            seconds = gradient_loggers.measure(training, device, TURNS, Path(directory))
        print(f"{gradient_loggers.table(seconds, device)}\n")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
