"""How many steps before the loss the other signals of a training that goes wrong fire.

    python -m benchmarks.early_warning [CAUSE ...] [--runs N] [--first-seed S] [--write]

Each cause is trained from N seeds, with a healthy twin of the same shape from each. `--write` puts
the tables into docs/early-warning.md.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch

from benchmarks.early_warning.causes import BY_NAME, CAUSES
from benchmarks.early_warning.runs import run_pair
from benchmarks.early_warning.table import tables, write

RUNS = 5
"""Trainings of each cause."""


def main() -> None:
    """Train, and print or write what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.early_warning", description=__doc__)
    parser.add_argument("causes", nargs="*", choices=[[], *BY_NAME], help="all without one")
    parser.add_argument("--runs", type=int, default=RUNS, help="seeds of each cause")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="also write docs/early-warning.md")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs has value {options.runs}; it must be above 0")
    causes = options.causes or [cause.name for cause in CAUSES]
    seeds = range(options.first_seed, options.first_seed + options.runs)
    pairs = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for pair in pool.map(run_pair, *zip(*product(causes, seeds), strict=True)):
            print(pair, file=sys.stderr, flush=True)
            pairs.append(pair)
    torch.set_num_threads(1)
    text = tables(pairs)
    print(text)
    if options.write:
        write(text)


if __name__ == "__main__":
    main()
