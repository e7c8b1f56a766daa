"""What each group of sampled statistics costs, on a sampled step and on average.

The small transformer of `training` is trained with every layer measured on every step. In turn one
step is made with no group, and one with each group alone; the probe's own time per step is
compared within such a round. On average a group costs its extra time once per `layer_interval`.

    python -m benchmarks.sampled_groups [--rounds N]
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.machine import describe, markdown
from benchmarks.training import make_training
from mp_agent.probe.probe import Probe
from mp_agent.probe.processes.rank_identity import make_identity
from mp_agent.ring.writer import RingWriter
from mp_agent.settings import Settings

GROUPS = ("measure_updates", "measure_distribution")
INTERVAL = Settings().layer_interval
HEADER = ("group", "share of a sampled step", "share of all steps")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    device = torch.device("cpu")
    training = make_training(device)

    def step() -> None:
        training.step(lambda: None)

    step()
    extra: dict[str, list[float]] = {group: [] for group in GROUPS}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds):
            bare = _seconds(step)
            seconds = {
                group: _watched_seconds(step, Path(directory) / f"{number}{group}", group)
                for group in ("", *GROUPS)
            }
            for group in GROUPS:
                extra[group].append((seconds[group] - seconds[""]) / bare)
    rows = [
        (f"`{group}`", f"{median(of):.1%}", f"{median(of) / INTERVAL:.3%}")
        for group, of in extra.items()
    ]
    print(f"{describe(device)}\n\n{markdown(HEADER, rows)}")


def _watched_seconds(step: Callable[[], None], directory: Path, group: str) -> float:
    """Return the time of a step on which one group, or none, is measured."""
    identity = make_identity("benchmark")
    settings = Settings(
        layer_interval=1,
        overhead_budget=1.0,
        measure_updates=group == "measure_updates",
        measure_distribution=group == "measure_distribution",
    )
    path = directory / "rank0.ring"
    probe = Probe(lambda: RingWriter.create(path, identity), settings)
    probe.attach()
    try:
        step()  # finds the model and makes the ring
        return _seconds(step)
    finally:
        probe.detach()


def _seconds(step: Callable[[], None]) -> float:
    start = perf_counter()
    step()
    return perf_counter() - start


if __name__ == "__main__":
    main()
