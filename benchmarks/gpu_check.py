"""Numerics, host syncs and cost on a CUDA machine, in one report: `make gpu-check`.

A section that fails says so, and the others go on; what is measured is printed at once. Exits with
1 if a test or a section failed, whether or not the targets are met; without CUDA it says why it has
nothing to do, and exits 0.

    python -m benchmarks.gpu_check [--no-tests] [--seconds N]
"""

import argparse
import faulthandler
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from traceback import format_exc
from typing import NamedTuple

import torch

from benchmarks import device_bandwidth, gradient_loggers, statistics_cost, step_overhead, targets
from benchmarks.machine import describe, markdown
from benchmarks.targets import Target
from benchmarks.training import GPT2_MEDIUM, SMALL, Shape, make_training

TESTS_SECONDS = 210
SECONDS = 260
PRECISIONS = (torch.bfloat16, torch.float16)
_PAIRS_SHARE, _LOGGERS_SHARE, _SMALL_SHARE = 0.15, 0.2, 0.05
"""Of the time for all, that of one precision's pairs, of its loggers, and of the small model."""
_STACK_AFTER = 1.2
"""Of the time for all: who is not done by then prints where it is."""

Measured = tuple[str, list[Target]]
Expected = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is that is measured, and how often and how long."""

    elements: int = 4 * device_bandwidth.ELEMENTS
    """Far more than what a device's cache holds."""
    model: Shape = GPT2_MEDIUM
    small_model: Shape = SMALL
    cases: tuple[statistics_cost.Case, ...] = statistics_cost.CASES
    turns: int = 20
    seconds: float = SECONDS


class Section(NamedTuple):
    """A part of the report, in Markdown."""

    text: str
    failed: bool = False


def report(device: torch.device, sizes: Sizes) -> Iterator[Section]:
    """Yield what each section measures, the targets last."""
    until = monotonic() + sizes.seconds
    found: list[Target] = []
    for title, expected, section in _sections(device, sizes):
        failed = False
        try:
            if monotonic() > until:
                raise TimeoutError("no time was left")
            text, reached = section()
        except Exception as error:
            failed = True
            text = f"Failed:\n\n{format_exc()}"
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            reached = [targets.not_measured(*each, reason) for each in expected]
        found += reached
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield Section(f"## {title}\n\n{text}\n", failed)
    date = datetime.now(UTC).date().isoformat()
    yield Section(f"## Targets\n\n{describe(device)}, {date}\n\n{targets.table(found)}\n")


def _sections(
    device: torch.device, sizes: Sizes
) -> Iterator[tuple[str, Expected, Callable[[], Measured]]]:
    bandwidth = [(device_bandwidth.TARGET, device_bandwidth.LIMIT)]
    yield "Reading, and copying", bandwidth, partial(_bandwidth, device, sizes)
    for precision in PRECISIONS:
        name = str(precision).removeprefix("torch.")
        whole = [(f"added to a training step, {name}", step_overhead.LIMIT)]
        yield f"Training in {name}", whole, partial(_overhead, device, sizes, precision)
    for precision in PRECISIONS:
        name = str(precision).removeprefix("torch.")
        peers = [
            (f"{each}, of mp_agent's: {name}", gradient_loggers.LIMIT)
            for each in gradient_loggers.PER_PARAMETER
        ]
        yield f"Loggers in {name}", peers, partial(_loggers, device, sizes, precision)
    yield "Statistics alone", [], partial(_statistics, device, sizes)
    yield "A small model", [], partial(_small_model, device, sizes)


def _bandwidth(device: torch.device, sizes: Sizes) -> Measured:
    rates = [
        device_bandwidth.measure(device, sizes.elements, dtype, sizes.turns)
        for dtype in device_bandwidth.DTYPES
    ]
    return device_bandwidth.table(device, rates), [rates[0].target()]


def _overhead(device: torch.device, sizes: Sizes, precision: torch.dtype) -> Measured:
    training = make_training(device, sizes.model, precision)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        row = step_overhead.compare_training(
            training, device, Path(directory), 2 * sizes.turns, _PAIRS_SHARE * sizes.seconds
        )
    return markdown(step_overhead.HEADER, [row.cells()]), [row.target()]


def _loggers(device: torch.device, sizes: Sizes, precision: torch.dtype) -> Measured:
    training = make_training(device, sizes.model, precision)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        turns = gradient_loggers.measure(
            training, device, sizes.turns, Path(directory), _LOGGERS_SHARE * sizes.seconds
        )
    found = gradient_loggers.targets(turns, training.what)
    return gradient_loggers.table(turns, device), found


def _statistics(device: torch.device, sizes: Sizes) -> Measured:
    costs = [statistics_cost.measure(case, device, sizes.turns) for case in sizes.cases]
    return statistics_cost.table(costs, device), []


def _small_model(device: torch.device, sizes: Sizes) -> Measured:
    training = make_training(device, sizes.small_model)
    limit_seconds = _SMALL_SHARE * sizes.seconds
    return step_overhead.table(training, device, sizes.turns, sizes.turns, limit_seconds), []


def run_tests() -> int:
    """Run tests/gpu and return their exit status; what they print is seen at once.

    By path, and without the settings of the other tests: a machine with a GPU may have no more
    than torch, pytest and what mp_agent itself needs.
    """
    command = (sys.executable, "-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu", "-q", "-rs")
    try:
        return subprocess.run(command, check=False, timeout=TESTS_SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"tests/gpu did not end within {TESTS_SECONDS} s.", flush=True)
        return 1


def main() -> int:
    """Run tests/gpu, then the benchmarks, and print all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for measuring")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"Nothing to check: torch {torch.__version__} finds no CUDA device on this machine.")
        return 0
    failed = not arguments.no_tests and run_tests() != 0
    device = torch.device("cuda", torch.cuda.current_device())
    faulthandler.dump_traceback_later(_STACK_AFTER * arguments.seconds)
    for section in report(device, Sizes(seconds=arguments.seconds)):
        print(section.text, flush=True)
        failed = failed or section.failed
    faulthandler.cancel_dump_traceback_later()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
