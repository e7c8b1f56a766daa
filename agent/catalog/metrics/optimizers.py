"""Readings of several optimizers: that of the step count without a label, others with theirs."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from mp_agent.catalog.metric import Reading

OPTIMIZER = ("optimizer",)
"""The optional label of metrics that other optimizers have too."""

View = TypeVar("View")


def of_optimizers(
    main: float | None, others: Mapping[str, View], read: Callable[[View], float | None]
) -> Reading:
    """Return a run's value, and those that `read` finds in the views of other optimizers."""
    return {(): main, **{(name,): read(view) for name, view in others.items()}}
