"""Whether the guard rescues trainings that fail without it, and leaves healthy ones alone.

    python -m benchmarks.guard [CASE ...] [--strategy plain] [--seeds 5] [--write]

Each case is trained with and without the guard, from the same seeds. `--write` puts the table and
the curves into docs/.
"""

import argparse
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import median

import torch

from benchmarks.guard.cases import CASES, PLANTED_STEP, Case
from benchmarks.guard.healthy import healthy_table
from benchmarks.guard.plot import page, panel
from benchmarks.guard.training import MEASURED_STEPS, STRATEGIES, train_on_ranks
from benchmarks.machine import describe, markdown

CONVERGED = 0.8
"""A training has converged whose last loss is below this part of the one before what is planted."""
TABLE, CURVES = Path("docs/guard-results.md"), Path("docs/images/guard.svg")

Courses = dict[tuple[str, int, bool], list[float]]


def main() -> None:
    """Train, and print or write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *(case.name for case in CASES)])
    parser.add_argument("--strategy", choices=tuple(STRATEGIES), action="append")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    strategies = options.strategy or list(STRATEGIES)
    courses = {}
    for strategy in strategies:
        courses[strategy] = train_on_ranks(cases, strategy, options.seeds)
        for case in cases:
            print(*_row(case, strategy, courses[strategy], options.seeds), sep=" | ", flush=True)
    table = markdown(
        (
            "what is planted",
            "policies",
            "training",
            "converged without",
            "converged with",
            "median loss",
        ),
        [
            _row(case, strategy, courses[strategy], options.seeds)
            for case in cases
            for strategy in strategies
        ],
    )
    text = f"{table}\n\n{healthy_table()}\n\n{describe(torch.device('cpu'))}\n"
    print(text)
    if options.write:
        TABLE.write_text(f"# Results of the guard\n\n{_HEAD}{text}", encoding="utf-8")
        panels = [
            panel(f"{case.name}, {strategy}", _lines(case, courses[strategy], options.seeds))
            for case in cases
            for strategy in strategies
        ]
        CURVES.write_text(page(panels, len(strategies)), encoding="utf-8")


_HEAD = (
    "Written by `python -m benchmarks.guard --write`, which trains each case from several seeds "
    "with and without the [guard](guard.md). A training has converged if its last held-out loss "
    "is below 80 % of the loss before the step at which the trouble was planted.\n\n"
)


def _row(case: Case, strategy: str, courses: Courses, seeds: int) -> tuple[str, ...]:
    without, guarded = (
        [courses[case.name, seed, mode] for seed in range(seeds)] for mode in (False, True)
    )
    return (
        case.title,
        case.policies,
        strategy,
        f"{sum(map(_converged, without))} of {seeds}",
        f"{sum(map(_converged, guarded))} of {seeds}",
        f"{_median(without)} → {_median(guarded)}",
    )


def _converged(course: Sequence[float]) -> bool:
    return (
        isfinite(course[-1]) and course[-1] < CONVERGED * course[PLANTED_STEP // MEASURED_STEPS - 1]
    )


def _median(courses: Sequence[Sequence[float]]) -> str:
    last = [course[-1] for course in courses]
    return "lost" if not all(map(isfinite, last)) else f"{median(last):.3g}"


def _lines(case: Case, courses: Courses, seeds: int) -> list[tuple[bool, list[float]]]:
    return [
        (mode, courses[case.name, seed, mode]) for mode in (False, True) for seed in range(seeds)
    ]


if __name__ == "__main__":
    main()
