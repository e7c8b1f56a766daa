"""What the whole probe costs a training step, and the probe's own time per step.

A transformer (of 5 M parameters by default) is trained in one process, in turns of a few steps with
the probe attached and a few without, in ABBA order; both see the same machine. A ratio is the
median over pairs of turns, with the 90 % interval of the bootstrapped median.

    python -m benchmarks.step_overhead [--device cuda] [--model NAME] [--precision NAME] [--pairs N]
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from benchmarks.machine import describe, markdown
from benchmarks.targets import Target, verdict
from benchmarks.training import Training, add_arguments, chosen_training
from mp_agent.probe.probe import Probe
from mp_agent.probe.processes.rank_identity import make_identity
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

STEPS_PER_TURN = 3
ADDED_AT_MOST = 0.005
LIMIT = f"at most {ADDED_AT_MOST:.1%}"
BOOTSTRAPS = 2000
PAIRS_AT_LEAST = 4
_FIRST_STEPS = 10
"""First steps, in which the probe finds what it watches, and measures all layers twice."""

HEADER = ("what", "without", "with", "ratio", "90 % interval")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds per step of paired turns."""

    what: str
    without: list[float]
    with_probe: list[float]

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table, below `HEADER`."""
        ratios = [b / a for a, b in zip(self.without, self.with_probe, strict=True)]
        low, high = interval(ratios)
        return (
            self.what,
            f"{median(self.without) * 1e3:.2f} ms",
            f"{median(self.with_probe) * 1e3:.2f} ms",
            f"**{median(ratios):.3f}**",
            f"{low:.3f} to {high:.3f}",
        )

    def target(self) -> Target:
        """Return whether the step takes no longer with the probe than is aimed at."""
        added = [b / a - 1.0 for a, b in zip(self.without, self.with_probe, strict=True)]
        low, high = interval(added)
        result = verdict(lambda share: share <= ADDED_AT_MOST, low, high)
        text = f"{low:.2%} to {high:.2%}"
        return Target(f"added to {self.what}", LIMIT, f"{median(added):.2%}", text, result)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 5th and 95th percentile of the median over resampled pairs."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS))
    return medians[BOOTSTRAPS // 20], medians[-BOOTSTRAPS // 20]


def make_probe(directory: Path, **settings: Any) -> Probe:
    """Return a probe that is not attached yet, with a ring of its own in `directory`."""
    identity = make_identity("benchmark")
    path = directory / f"{identity.created_unix_ns}" / "rank0.ring"
    chosen = Settings(overhead_budget=1.0, **settings)
    return Probe(lambda: RingWriter.create(path, identity), chosen)


def compare(
    what: str,
    step: Callable[[], None],
    directory: Path,
    pairs: int,
    steps: int,
    finish: Callable[[], None],
    limit_seconds: float = inf,
) -> Comparison:
    """Time `step` with and without the probe; `finish` waits for the device.

    After `limit_seconds` no pair begins any more, but for the first ones.
    """
    until = monotonic() + limit_seconds
    without: list[float] = []
    with_probe: list[float] = []

    def turn() -> float:
        finish()
        start = perf_counter()
        for _ in range(steps):
            step()
        finish()
        return (perf_counter() - start) / steps

    def watched_turn() -> float:
        probe.attach()
        step()  # the first step walks the module tree and makes the ring's body
        return turn()

    for pair in range(pairs + 1):
        if pair >= PAIRS_AT_LEAST and monotonic() > until:
            break
        for watched in (False, True) if pair % 2 else (True, False):
            if not watched:
                without.append(turn())
                continue
            probe = make_probe(directory)
            with_probe.append(watched_turn())
            probe.detach()
    return Comparison(what, without[1:], with_probe[1:])


def _nothing() -> None:
    pass


class _NoUpdate(torch.optim.Optimizer):
    """An optimizer whose step does nothing: what is left is the probe."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


def probe_against_norm(
    directory: Path, device: torch.device, turns: int, limit_seconds: float = inf
) -> Comparison:
    """Compare the probe's whole time per step with `get_total_norm`, 200 tensors of 1 k each."""
    until = monotonic() + limit_seconds
    parameters = [nn.Parameter(torch.randn(1024, device=device)) for _ in range(200)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    optimizer = _NoUpdate(parameters)
    bare = _NoUpdate(parameters)
    probe = make_probe(directory)
    norms: list[float] = []
    probes: list[float] = []
    for turn in range(turns):
        if turn >= PAIRS_AT_LEAST and monotonic() > until:
            break
        norms.append(_seconds(lambda: get_total_norm(gradients)))
        idle = _seconds(bare.step)
        probe.attach(optimizer=optimizer)
        for _ in range(_FIRST_STEPS):
            optimizer.step()
        probes.append(median(_seconds(optimizer.step) for _ in range(5)) - idle)
        probe.detach()
        probe = make_probe(directory)
    return Comparison(
        "the probe's whole time per step, compared with get_total_norm", norms, probes
    )


def _seconds(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=24)
    arguments = parser.parse_args()
    print(table(chosen_training(arguments), arguments.device, arguments.pairs))


def compare_training(
    training: Training,
    device: torch.device,
    directory: Path,
    pairs: int,
    limit_seconds: float = inf,
) -> Comparison:
    """Time a step of `training` with and without the probe."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    what = f"a training step: {training.what}"
    step = partial(training.step, _nothing)
    return compare(what, step, directory, pairs, STEPS_PER_TURN, finish, limit_seconds)


def table(
    training: Training,
    device: torch.device,
    pairs: int,
    norm_turns: int = 50,
    limit_seconds: float = inf,
) -> str:
    """Return the measurements with the machine's description, as Markdown.

    limit_seconds: of each of the two; after it no pair begins any more, but for the first ones.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        rows = [
            compare_training(training, device, Path(directory), pairs, limit_seconds),
            probe_against_norm(Path(directory), device, norm_turns, limit_seconds),
        ]
    return f"{describe(device)}\n\n{markdown(HEADER, (row.cells() for row in rows))}"


if __name__ == "__main__":
    main()
