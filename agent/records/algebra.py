"""How several values of a column become one: the same rule at every stage of the way.

NaN stands for a value that is absent, and contributes nothing; where all are absent, so is the
result.
"""

from collections.abc import Sequence
from enum import Enum
from math import fsum, inf, isfinite, isnan, ldexp, nan

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_SCALE = 64
"""Powers of two by which terms are made smaller when adding them up overflows on the way."""


class Algebra(Enum):
    """How the values of several ranks become one; every member is associative and commutative."""

    SUM = "sum"
    """Add the shards; of equal replicas take one."""

    MAX = "max"
    """The largest. Also for flags (any rank) and for values that are equal on all ranks."""

    MIN = "min"
    """The smallest value."""

    MEAN = "mean"
    """The mean over the ranks that observed a value; for columns of a step only. A mean over
    gradient elements is a SUM divided, where it is read, by the number of elements."""

    OWN = "own"
    """Belongs to its rank; never merged."""

    @property
    def identity(self) -> float:
        """Return the value that changes no other one. Raises KeyError for MEAN and OWN."""
        return _IDENTITIES[self]

    def merged(self, values: Sequence[float], counts: Sequence[int] | None = None) -> float:
        """Return some values as one; Inf where a sum is beyond float64.

        counts: of how many ranks each is, for a MEAN; one each by default.
        """
        observed = [value for value in values if not isnan(value)]
        if not observed:
            return nan
        if self is Algebra.SUM:
            return _sum(observed)
        if self is Algebra.MEAN:
            if counts is not None:
                counts = [n for n, value in zip(counts, values, strict=True) if not isnan(value)]
            return _mean(observed, counts or [1] * len(observed))
        return _EXTREMES[self](observed)

    def merged_array(
        self, values_N: FloatArray, counts_N: npt.NDArray[np.int64] | None = None
    ) -> float:
        """Return the same as `merged` of an array, bit for bit."""
        there_N = ~np.isnan(values_N)
        observed = values_N[there_N]
        if not len(observed):
            return nan
        if self in _EXTREMES:
            return float(_FOLDS[self].reduce(observed))
        if not observed.any():
            return 0.0
        if self is Algebra.SUM:
            return _sum(observed.tolist())
        counts = np.ones(len(observed)) if counts_N is None else counts_N[there_N]
        with np.errstate(over="ignore"):
            mean = _sum((observed * counts).tolist()) / float(counts.sum())
        return mean if isfinite(mean) else _mean(observed.tolist(), counts.astype(int).tolist())

    def folded(self, values_NL: FloatArray) -> FloatArray:
        """Return [L]: N arrays as one. Raises KeyError for MEAN and OWN."""
        folded_L: FloatArray = _FOLDS[self].reduce(values_NL, axis=0)
        if self is Algebra.SUM and np.isnan(folded_L).any():
            absent_NL = np.isnan(values_NL)
            folded_L = np.where(absent_NL, 0.0, values_NL).sum(axis=0)
            folded_L[absent_NL.all(axis=0)] = nan
        return folded_L

    def folded_into(
        self, values_N: FloatArray, targets_N: npt.NDArray[np.intp], size: int
    ) -> FloatArray:
        """Return [size]: each value folded into its target. Raises KeyError for MEAN and OWN."""
        there_N = ~np.isnan(values_N)
        folded = np.full(size, self.identity)
        _FOLDS[self].at(folded, targets_N[there_N], values_N[there_N])
        absent = np.ones(size, dtype=np.bool_)
        absent[targets_N[there_N]] = False
        folded[absent] = nan
        return folded

    def repeated(self, values: FloatArray, count: int) -> FloatArray:
        """Return what `count` equal arrays are together."""
        return values * count if self is Algebra.SUM else values


_IDENTITIES = {Algebra.SUM: 0.0, Algebra.MAX: -inf, Algebra.MIN: inf}
_EXTREMES = {Algebra.MAX: max, Algebra.MIN: min}
_FOLDS = {Algebra.SUM: np.add, Algebra.MAX: np.fmax, Algebra.MIN: np.fmin}


def _sum(terms: Sequence[float]) -> float:
    try:
        return fsum(terms)
    except OverflowError:
        return _large_sum(terms)
    except ValueError:  # both infinities
        return nan


def _large_sum(terms: Sequence[float]) -> float:
    total = fsum(ldexp(term, -_SCALE) for term in terms)
    try:
        return ldexp(total, _SCALE)
    except OverflowError:
        return inf if total > 0.0 else -inf


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    total = sum(counts)
    mean = _sum([value * count for value, count in zip(values, counts, strict=True)]) / total
    if isfinite(mean):
        return mean
    return _sum([value * (count / total) for value, count in zip(values, counts, strict=True)])
