"""How many steps before the loss leaves its course other signs of a failing training fire.

    python -m benchmarks.early_warning --kept DIR [CAUSE ...] [--runs N] [--first-seed S] [--write]

Each cause is trained from N seeds, with a healthy twin of the same shape from each. What is trained
is kept in DIR, from where an interrupted run goes on and other thresholds are judged without
training again. `--losses` shows the losses of trainings without the probe, and keeps nothing: so
that a cause can be set without seeing what the conditions make of it. `--write` puts the tables
into docs/early-warning.md.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.early_warning.causes import BY_NAME, Cause
from benchmarks.early_warning.judging import judge
from benchmarks.early_warning.leads import Pair, doubled_step, left_step, smoothed
from benchmarks.early_warning.table import tables, write
from benchmarks.early_warning.training import Trained, losses_of, train_once

RUNS = 5
"""Trainings of each cause."""
_SHOWN_STEPS = 20


def main() -> None:
    """Train, and print or write what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.early_warning", description=__doc__)
    parser.add_argument("causes", nargs="*", choices=[[], *BY_NAME], help="all without one")
    parser.add_argument("--kept", type=Path, required=True, help="directory of what is trained")
    parser.add_argument("--runs", type=int, default=RUNS, help="seeds of each cause")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--losses", action="store_true", help="show losses, and judge nothing")
    parser.add_argument("--write", action="store_true", help="also write docs/early-warning.md")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs has value {options.runs}; it must be above 0")
    options.kept.mkdir(parents=True, exist_ok=True)
    seeds = range(options.first_seed, options.first_seed + options.runs)
    pairs = []
    # A seed as a whole before the next one, so that what an interruption leaves is of all causes.
    for seed, name in product(seeds, options.causes or BY_NAME):
        cause = BY_NAME[name]
        if options.losses:
            both = losses_of(cause.faulty, seed), losses_of(cause.healthy, seed)
            print(*_shown(cause, seed, *both), sep="\n", flush=True)
            continue
        faulty = train_once(cause.faulty, seed, options.kept)
        healthy = train_once(cause.healthy, seed, options.kept)
        pairs.append(_pair(cause, seed, faulty, healthy))
        print(pairs[-1], file=sys.stderr, flush=True)
    if options.losses:
        return
    pairs.sort(key=lambda pair: list(BY_NAME).index(pair.cause))
    text = tables(pairs)
    print(text)
    if options.write:
        write(text)


def _pair(cause: Cause, seed: int, faulty: Trained, healthy: Trained) -> Pair:
    return Pair(
        cause=cause.name,
        seed=seed,
        twin=cause.healthy.name,
        faulty=judge(faulty.rank),
        healthy=judge(healthy.rank),
        left_step=left_step(faulty.losses, healthy.losses),
        doubled_step=doubled_step(faulty.seen),
        twin_left_step=left_step(healthy.losses, healthy.losses),
        steps=len(faulty.losses),
        faulty_loss=smoothed(faulty.losses, len(faulty.losses)),
        healthy_loss=smoothed(healthy.losses, len(healthy.losses)),
    )


def _shown(
    cause: Cause, seed: int, faulty: Sequence[float], healthy: Sequence[float]
) -> tuple[str, ...]:
    """Return where the losses of a pair go."""
    steps = range(_SHOWN_STEPS, len(faulty) + 1, _SHOWN_STEPS)
    return (
        f"{cause.name} {seed}: left its course at {left_step(faulty, healthy)}, "
        f"twin at {left_step(healthy, healthy)}",
        *(
            f"  {' '.join(f'{smoothed(losses, step):.3g}' for step in steps)}"
            for losses in (faulty, healthy)
        ),
    )


if __name__ == "__main__":
    main()
