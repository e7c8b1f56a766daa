"""Brings two runs onto common steps where scrapes saw only some of them."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from statistics import median

from mp_agent.compare.runs.series import RunSeries, RunStep


def interval_steps(first: RunSeries, second: RunSeries) -> int:
    """Return within how many steps two runs can be matched; 1: exactly."""
    return max(1, ceil(max(first.scraped_steps, second.scraped_steps)))


def aligned(run: RunSeries, interval: int) -> RunSeries:
    """Return a run with a step per interval, called by its first; the same run for 1.

    Values are medians over the steps of the interval, and it has the marks of all of them.
    """
    if interval == 1:
        return run
    groups: dict[int, list[RunStep]] = {}
    for number in sorted(run.steps):
        groups.setdefault(number // interval * interval, []).append(run.steps[number])
    return replace(run, steps={begin: _joined(steps) for begin, steps in groups.items()})


def _joined(steps: list[RunStep]) -> RunStep:
    values: dict[str, list[float]] = {}
    for step in steps:
        for quantity, value in step.values.items():
            values.setdefault(quantity, []).append(value)
    medians: Mapping[str, float] = {name: median(found) for name, found in values.items()}
    return RunStep(medians, frozenset().union(*(step.marks for step in steps)))
