"""One number of a record: its name, its algebra, and how often it is measured."""

from dataclasses import dataclass
from enum import Enum

from mp_agent.records.algebra import Algebra


class Tier(Enum):
    """How often a column of a family is measured."""

    EVERY_STEP = "every step"

    SAMPLED = "sampled"
    """When layers are looked at; absent from the totals of other steps."""


class Unscaling(Enum):
    """How the value of scaled gradients follows the loss scale: the power of it to divide by."""

    NONE = 0
    LINEAR = 1
    SQUARED = 2


@dataclass(frozen=True, slots=True)
class Column:
    """One float64 of a record: its name (with unit), algebra and meaning."""

    name: str
    algebra: Algebra
    meaning: str
    tier: Tier = Tier.EVERY_STEP
    unscaling: Unscaling = Unscaling.NONE
    signed: bool = False
    """Whether a value may be negative; otherwise a report with one is refused."""


def sampled(name: str, algebra: Algebra, meaning: str, *, signed: bool = False) -> Column:
    """Return a column that is measured on sampled steps."""
    return Column(name, algebra, meaning, Tier.SAMPLED, signed=signed)
