"""A column of a record, how several of its values become one, and a family of columns.

The rule by which values become one is the same at every stage of the way. NaN stands for a value
that is absent, and contributes nothing; where all are absent, so is the result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import fsum, inf, isfinite, isnan, ldexp, nan

import numpy as np
import numpy.typing as npt

from mp_agent.errors import CatalogError

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
        if len(values) == 1 and self is not Algebra.OWN:
            # Adding 0 makes 0.0 of -0.0, as a sum of several does.
            return values[0] + 0.0 if self in (Algebra.SUM, Algebra.MEAN) else values[0]
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
        if len(values_N) == 1:
            return self.merged(values_N.tolist())
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


class Tier(Enum):
    """How often a column of a family is measured."""

    EVERY_STEP = "every step"

    SAMPLED = "sampled"
    """When layers are looked at; absent from the totals of other steps."""

    LAYERS = "layers"
    """Of layers alone; the totals of no step have it."""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnFamily:
    """Statistics that are measured together: what a row is of, its columns, and when it counts.

    A row is of the elements that a rank has of one share, or of one layer. Of both kinds of rows
    shards are united by the columns' algebra, and of equal replicas one is taken. Column names are
    unique within a family. Raises CatalogError for columns that cannot be merged so.
    """

    name: str
    row: str
    """What a row is of."""
    columns: tuple[Column, ...]
    key: str
    """The column that is there whenever a row was measured; without it no row counts."""
    required: tuple[str, ...]
    """What a layer's row must have to count."""
    size: str
    """The column with the number of elements; a row of 0 elements was not measured."""
    nonfinite: tuple[str, ...] = ()
    """Columns with the numbers of elements that are not finite; a row that has any does not count,
    and replicas of it are compared by these and by `size` alone."""
    compares_replicas: bool = False
    """Whether replicas of a share are expected to have equal rows."""
    counts_when_skipped: bool = True
    """Whether rows of a step count whose update GradScaler skipped."""
    of_parameters: bool = True
    """Whether rows are of parameters, and of their shares; other families have their own shares,
    and take no room where nothing of them is measured."""
    compared_only: bool = False
    """Whether rows serve to compare what ranks hold, layer by layer, and are never merged."""
    of_some_ranks: bool = False
    """Whether a rank that is present may have no row: then a step counts with those that are there.
    Otherwise it takes the rows of all ranks that have a share."""

    def __post_init__(self) -> None:
        for column in self.columns:
            if column.algebra in (Algebra.MEAN, Algebra.OWN):
                raise CatalogError(
                    f"{column.name}: algebra {column.algebra.value} does not exist for {self.name}"
                )
        if len(set(self.names)) != len(self.names):
            raise CatalogError(f"{self.name}: names of columns are not unique")
        if Tier.LAYERS in {column.tier for column in self.columns[: self.totals]}:
            raise CatalogError(f"{self.name}: columns of layers alone do not come last")
        needed = {self.key, self.size, *self.required, *self.nonfinite}
        if unknown := needed - set(self.names):
            raise CatalogError(f"{self.name}: {', '.join(sorted(unknown))} is no column")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in the order of a row."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def sampled(self) -> tuple[str, ...]:
        """The names of the columns that are not measured on every step."""
        return tuple(column.name for column in self.columns if column.tier is Tier.SAMPLED)

    @cached_property
    def totals(self) -> int:
        """The number of columns, the first ones, that the totals of a step have."""
        return sum(column.tier is not Tier.LAYERS for column in self.columns)

    @property
    def cadence(self) -> Tier:
        """How often there is a row of a share; layers are sampled in any case."""
        tiers = {column.tier for column in self.columns}
        return Tier.EVERY_STEP if Tier.EVERY_STEP in tiers else Tier.SAMPLED

    def nonfinite_elements(self, values: Mapping[str, float]) -> float:
        """Return how many elements of a row, given by name, are not finite."""
        elements = 0.0
        for name in self.nonfinite:
            elements += values.get(name, 0.0)
        return elements

    def counts(self, values: Mapping[str, float]) -> bool:
        """Return whether a row, given by name, was measured and is of finite elements only."""
        return self.key in values and self.nonfinite_elements(values) == 0.0

    def has_rows(self, values: Mapping[str, float]) -> bool:
        """Return whether a row, by name, is of anything: none is of a layer without gradient."""
        return any(values.get(name, 1.0) != 0.0 for name in (self.size, self.key))

    def has_sample(self, values: Mapping[str, float]) -> bool:
        """Return whether a row, by name, has any of the sampled columns."""
        return not values.keys().isdisjoint(self.sampled)

    def with_last_sample(
        self, values: Mapping[str, float], before: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return a row, by name, with sampled columns from `before` if it has none of its own."""
        if not self.sampled or self.has_sample(values):
            return values
        kept = {name: before[name] for name in self.sampled if name in before}
        return {**kept, **values} if kept else values

    def merged(self, rows: Iterable[Sequence[float]]) -> dict[str, float]:
        """Return rows, at least one, as one; without what none has or what is beyond float64."""
        values = {
            column.name: column.algebra.merged(found)
            for column, found in zip(self.columns, zip(*rows, strict=True), strict=True)
        }
        return {name: value for name, value in values.items() if isfinite(value)}

    def merged_array(self, rows_NC: FloatArray) -> dict[str, float]:
        """Return the same as `merged` of an array."""
        if len(rows_NC) == 1:
            return self.merged(rows_NC.tolist())
        values = {
            column.name: column.algebra.merged_array(values_N)
            for column, values_N in zip(self.columns, rows_NC.T, strict=True)
        }
        return {name: value for name, value in values.items() if isfinite(value)}
