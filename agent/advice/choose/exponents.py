"""Magnitudes of gradients, counted by exponent, and what FP16 makes of them under a loss scale."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, inf, log2

FP16_LARGEST = 65504.0
_LOWEST = -25
"""A magnitude below 2^-25 is rounded to zero in FP16, whose smallest number is 2^-24."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentCounts:
    """Elements by floor(log2) of their magnitude."""

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    nonfinite: int = 0
    abs_max: float = 0.0
    """Largest finite magnitude."""

    @property
    def nonzero(self) -> int:
        """Return how many finite elements are not zero."""
        return sum(self.counts.values())

    @property
    def zero_ratio(self) -> float:
        """Return the share of finite elements that are zero; 0 for none at all."""
        return self.zeros / max(1, self.zeros + self.nonzero)

    def plus(self, other: "ExponentCounts") -> "ExponentCounts":
        """Return the counts of both."""
        counts = dict(self.counts)
        for exponent, count in other.counts.items():
            counts[exponent] = counts.get(exponent, 0) + count
        return ExponentCounts(
            counts=counts,
            zeros=self.zeros + other.zeros,
            nonfinite=self.nonfinite + other.nonfinite,
            abs_max=max(self.abs_max, other.abs_max),
        )

    def lost_ratio(self, loss_scale: float = 1.0) -> float:
        """Return the share of non-zero elements that FP16 rounds to zero, at a loss scale.

        A scale that is no power of two counts as the next lower one.
        """
        shift = floor(log2(loss_scale))
        lost = sum(count for exponent, count in self.counts.items() if exponent + shift < _LOWEST)
        return lost / max(1, self.nonzero)

    def quantile(self, share: float) -> float:
        """Return a lower bound, a power of two, of the quantile of magnitudes; inf for none."""
        wanted, seen = share * self.nonzero, 0
        for exponent in sorted(self.counts):
            seen += self.counts[exponent]
            if seen >= max(1.0, wanted):
                return 2.0**exponent
        return inf
