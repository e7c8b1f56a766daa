"""Numerics, host syncs and cost on a CUDA machine, in one report: `make gpu-check`.

Each part is printed as soon as it is there, and one that fails leaves the others; a table of the
targets comes last. Exits with 1 if a test or a part failed, whether or not the targets are met;
without CUDA it says why it has nothing to do, and exits 0.
"""

import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks import device_bandwidth, gradient_loggers, statistics_cost, step_overhead
from benchmarks.machine import describe, markdown
from benchmarks.training import GPT2_MEDIUM, SMALL, Shape, make_training

BANDWIDTH_SHARE_AT_LEAST = 0.85
"""Of a copy on the same device, for FP32."""
STEP_SHARE_AT_MOST = 0.005
"""Of a step of the large model."""
TIMES_CHEAPER_AT_LEAST = 10.0
"""Than each logger that has a value per parameter."""

PER_PARAMETER = tuple(
    name
    for name in gradient_loggers.LOGGERS
    if name not in (gradient_loggers.BARE, "mp_agent", "get_total_norm")
)
TARGET_HEADER = ("target", "wanted", "measured", "")


class Size(NamedTuple):
    """How much is measured."""

    turns: int = 20
    rounds: int = 10
    """Of all loggers; each starts wandb once more."""
    elements: int = device_bandwidth.ELEMENTS
    cases: tuple[statistics_cost.Case, ...] = statistics_cost.CASES
    small: Shape = SMALL
    large: Shape = GPT2_MEDIUM


class Target(NamedTuple):
    """A target and what was measured of it, as the row of a table below `TARGET_HEADER`."""

    what: str
    wanted: str
    measured: str
    verdict: str


class Part(NamedTuple):
    """Markdown, and the targets that it has measured."""

    text: str
    targets: tuple[Target, ...] = ()


def parts(device: torch.device, size: Size) -> Iterator[tuple[str, Callable[[], Part]]]:
    """Yield the name of each part of the report, and what measures it."""
    yield "statistics", lambda: _statistics(device, size)
    yield "bandwidth", lambda: _bandwidth(device, size)
    yield "steps of a small model", lambda: _small_steps(device, size)
    yield "steps in BF16", lambda: _large_steps(device, size, torch.bfloat16)
    yield "steps in FP16", lambda: _large_steps(device, size, torch.float16)


def report(device: torch.device, size: Size) -> bool:
    """Print all parts, then the targets; return whether none of the parts failed."""
    print(f"{describe(device)}, {datetime.now(timezone.utc):%Y-%m-%d}\n", flush=True)
    targets: list[Target] = []
    failed: list[str] = []
    for name, measure in parts(device, size):
        try:
            part = measure()
        except Exception:
            failed.append(name)
            print(f"## {name}: failed\n\n```\n{traceback.format_exc()}```\n", flush=True)
            continue
        print(f"## {name}\n\n{part.text}\n", flush=True)
        targets += part.targets
    print(f"## targets\n\n{markdown(TARGET_HEADER, targets)}", flush=True)
    if failed:
        print(f"\nNot measured, since it failed: {', '.join(failed)}.", flush=True)
    return not failed


def _statistics(device: torch.device, size: Size) -> Part:
    costs = [statistics_cost.measure(case, device, size.turns) for case in size.cases]
    return Part(statistics_cost.table(costs, device))


def _bandwidth(device: torch.device, size: Size) -> Part:
    measured = device_bandwidth.measure_all(device, size.elements, size.turns)
    targets = tuple(
        Target(
            "statistics' bytes per second, of a copy's, FP32",
            f"≥ {BANDWIDTH_SHARE_AT_LEAST:.0%}",
            f"{each.share:.0%}",
            _verdict(each.share >= BANDWIDTH_SHARE_AT_LEAST),
        )
        for each in measured
        if each.dtype is torch.float32
    )
    return Part(device_bandwidth.table(measured, device), targets)


def _small_steps(device: torch.device, size: Size) -> Part:
    measured = step_overhead.measure(make_training(device, size.small), device, size.turns)
    return Part(step_overhead.table(measured, device))


def _large_steps(device: torch.device, size: Size, precision: torch.dtype) -> Part:
    """Measure the large model, in FP16 with GradScaler, with the probe and with other loggers."""
    training = make_training(device, size.large, precision)
    steps = step_overhead.measure(training, device, size.turns)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        seconds = gradient_loggers.measure(training, device, size.rounds, Path(directory))
    loggers = f"{training.what}: {gradient_loggers.table(seconds, device)}"
    return Part(
        f"{step_overhead.table(steps, device)}\n\n{loggers}",
        (_share_of_step(steps[0]), *_times_cheaper(training.what, seconds)),
    )


def _share_of_step(steps: step_overhead.Comparison) -> Target:
    low, high = (bound - 1.0 for bound in step_overhead.interval(steps.ratios))
    undecided = low <= STEP_SHARE_AT_MOST < high
    return Target(
        f"added to {steps.what}",
        f"≤ {STEP_SHARE_AT_MOST:.1%}",
        f"{median(steps.ratios) - 1.0:.2%} ({low:.2%} to {high:.2%})",
        "undecided" if undecided else _verdict(high <= STEP_SHARE_AT_MOST),
    )


def _times_cheaper(what: str, seconds: gradient_loggers.Turns) -> Iterator[Target]:
    own = gradient_loggers.added(seconds, "mp_agent")
    for name in PER_PARAMETER:
        if name not in seconds:
            times, verdict = "not installed", "not measured"
        elif own <= 0.0:
            times, verdict = "mp_agent adds nothing measurable", "undecided"
        else:
            ratio = gradient_loggers.added(seconds, name) / own
            times, verdict = f"{ratio:.1f} times", _verdict(ratio >= TIMES_CHEAPER_AT_LEAST)
        wanted = f"≥ {TIMES_CHEAPER_AT_LEAST:.0f} times"
        yield Target(f"what {name} adds, of mp_agent's: {what}", wanted, times, verdict)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _run_tests() -> bool:
    """Run tests/gpu, print how they ended, and return whether they passed.

    By path, and without the settings of the other tests: a machine with a GPU may have no more
    than torch, pytest and what mp_agent itself needs.
    """
    command = (sys.executable, "-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu", "-q", "-rs")
    tests = subprocess.run(command, check=False, capture_output=True, text=True)
    if tests.returncode:
        print(tests.stdout, tests.stderr, sep="\n")
    verdict = tests.stdout.strip().rpartition("\n")[2].strip("= ")
    print(f"tests/gpu (numerics, no host sync, crashes): {verdict}\n", flush=True)
    return tests.returncode == 0


def main() -> int:
    """Run tests/gpu, then the benchmarks, and print all."""
    if not torch.cuda.is_available():
        print(f"Nothing to check: torch {torch.__version__} finds no CUDA device on this machine.")
        return 0
    passed = _run_tests()
    measured = report(torch.device("cuda", torch.cuda.current_device()), Size())
    return 0 if passed and measured else 1


if __name__ == "__main__":
    sys.exit(main())
