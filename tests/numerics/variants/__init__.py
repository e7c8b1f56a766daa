"""The ways of splitting a model over four ranks; each trains it and returns the reference."""

from tests.numerics.registry import VARIANTS

# Importing them registers what they hold.
from tests.numerics.variants import (  # noqa: F401
    data_parallel,
    experts,
    pipelines,
    sharded,
    tensor_parallel,
)

__all__ = ["VARIANTS"]
