"""Logs for the tests: points of runs that are healthy or go wrong, and rows of them."""

from collections.abc import Sequence
from math import nan
from random import Random
from typing import Any

from mp_agent.backtest.log.training_log import Point, TrainingLog


def healthy_points(count: int, *, every: int = 1, seed: int = 1, **values: Any) -> list[Point]:
    random = Random(seed)
    return [
        Point(
            step=number * every,
            loss=2.0 * number**-0.1 + random.gauss(0, 0.02),
            grad_norm=random.lognormvariate(0, 0.2),
            learning_rate=1e-3,
            **values,
        )
        for number in range(1, count + 1)
    ]


def broken_points(count: int, broken_from: int, *, every: int = 1) -> list[Point]:
    """Return points whose norm and loss are NaN from one on, by its place from 1."""
    return [
        point
        if number < broken_from
        else Point(step=point.step, loss=nan, grad_norm=nan, learning_rate=1e-3)
        for number, point in enumerate(healthy_points(count, every=every), start=1)
    ]


def log_of(points: Sequence[Point], **changes: Any) -> TrainingLog:
    facts: dict[str, Any] = {"name": "run", "source": "log", "format": "test", **changes}
    return TrainingLog(points=tuple(points), **facts)


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [{name: getattr(point, name) for name in names} for point in points]
