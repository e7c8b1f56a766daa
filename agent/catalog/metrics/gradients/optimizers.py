"""Readings of several optimizers: the run's own without a label, each optimizer's with its."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from mp_agent.catalog.metric import Reading

OPTIMIZER = ("optimizer",)
"""The optional label of metrics that each of several optimizers has too."""

View = TypeVar("View")


def of_optimizers(
    main: float | None, optimizers: Mapping[str, View], read: Callable[[View], float | None]
) -> Reading:
    """Return a run's value, and those that `read` finds in the views of its optimizers."""
    if not optimizers:
        return main
    return {(): main, **{(name,): read(view) for name, view in optimizers.items()}}
