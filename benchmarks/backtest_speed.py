"""How long a backtest takes: 100 logs of 10 000 points, half of them with a loss scale.

Run: python -m benchmarks.backtest_speed [--runs 100] [--points 10000] [--processes 2]

It also prints the time of a fixed piece of work, measured before, during and after on the same
machine: on a busy one both grow, and their ratio stays.
"""

import argparse
import csv
import tempfile
import time
from math import nan
from pathlib import Path
from random import Random

from mp_agent.alerting.values import values_in_force
from mp_agent.backtest.log.training_log import ReadOptions
from mp_agent.backtest.past_runs import Job, judge_all, split
from mp_agent.backtest.readers.find import Source

TARGET_SECONDS = 60.0
_REFERENCE_ROUNDS = 300_000


def write_log(path: Path, number: int, points: int) -> None:
    """Write a log; every tenth run loses its gradients at the end."""
    random = Random(number)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "loss", "grad_norm", "learning_rate", "loss_scale"))
        for step in range(1, points + 1):
            broken = number % 10 == 0 and step > 0.99 * points
            writer.writerow(
                (
                    step,
                    nan if broken else 2.0 * step**-0.1 + random.gauss(0, 0.05),
                    nan if broken else random.lognormvariate(0, 0.3),
                    1e-4,
                    65536.0 if number % 2 else "",
                )
            )


def reference_seconds() -> float:
    """Return the wall time of a fixed piece of work on one processor."""
    begun = time.perf_counter()
    table: dict[int, float] = {}
    for number in range(_REFERENCE_ROUNDS):
        table[number & 255] = table.get(number & 255, 0.0) + number * 0.5
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / f"run-{number}.csv" for number in range(options.runs)]
        for number, path in enumerate(paths):
            write_log(path, number, options.points)
        references = [reference_seconds()]
        job = Job(options=ReadOptions(), values=(values_in_force(),))
        begun = time.perf_counter()
        judged = judge_all(
            [Source(str(path)) for path in paths],
            job,
            processes=options.processes,
            progress=lambda: references.append(reference_seconds()),
        )
        seconds = time.perf_counter() - begun - sum(references[1:])
        references.append(reference_seconds())
    runs, failures = split(judged)
    assert not failures and len(runs) == options.runs
    found = sum(run[0].worst == "critical" for run in runs)
    total = options.runs * options.points
    reference = sorted(references)[len(references) // 2]
    print(f"{options.runs} runs of {options.points} points on {options.processes} processes")
    each = seconds / total * 1e6 * options.processes
    print(f"{seconds:.1f} s ({each:.0f} µs per point and process); target {TARGET_SECONDS:.0f} s")
    print(f"reference work: {1000 * reference:.1f} ms (median of {len(references)})")
    print(f"ratio per 1000 points and process: "
          f"{seconds * options.processes / total * 1000 / reference:.2f}")  # fmt: skip
    print(f"{found} runs with a critical alert, of {sum(n % 10 == 0 for n in range(options.runs))}")


if __name__ == "__main__":
    main()
