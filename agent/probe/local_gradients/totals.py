"""What was measured of a step's gradients, parameter by parameter, and what it comes to."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import nan
from sys import float_info
from typing import NamedTuple

import torch

from mp_agent.probe.scalars import Scalar, add, scalar_of
from mp_agent.probe.statistics.table import folded_rows
from mp_agent.records.columns import GRADIENT_POSITIONS, GRADIENTS

_SUM_SQUARES = GRADIENT_POSITIONS["sum_squares"]
_NONFINITE = tuple(GRADIENT_POSITIONS[name] for name in GRADIENTS.nonfinite)


class OwnGradients(NamedTuple):
    """The gradients of a step: norm and NaN and Inf elements, and where these began."""

    norm: Scalar
    nonfinite_elements: Scalar
    nonfinite_backward: Scalar
    """Number, from 1, of the first backward after which there were some; NaN without any."""
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Parameters that were measured together, by their places, and their statistics [C]."""

    places: frozenset[int]
    row_C: torch.Tensor


class LocalTotals:
    """The newest statistics of each parameter's gradient in the step under way.

    NaN and Inf of gradients that a wrapper has taken away, to reduce them, count besides.
    """

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        """By the place of each parameter."""
        self._taken: set[_Part] = set()
        self._elements_taken: Scalar = 0.0
        self._rows: list[torch.Tensor] = []
        """All statistics [C] of the backward under way, also those that others have replaced."""
        self._nonfinite: list[Scalar] = []
        """NaN and Inf elements after each backward, without those of `_rows`."""
        self._begins_unknown = False
        """Whether it is not known after which backward there were some first."""

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def begun(self) -> bool:
        """Whether a backward of the step has begun."""
        return bool(self._nonfinite)

    def backward_begins(self, was_taken: Callable[[int], bool]) -> None:
        """Begin a backward. was_taken: whether the gradient of a place is no longer there."""
        self._count_rows()
        self._nonfinite.append(0.0)
        present = [part for part in self._different_parts() if part not in self._taken]
        gone = [part for part in present if all(map(was_taken, part.places))]
        self._elements_taken = _more(self._elements_taken, [part.row_C for part in gone])
        self._taken.update(gone)

    def forget(self) -> None:
        """Forget the step."""
        self._parts.clear()
        self._taken.clear()
        self._elements_taken = 0.0
        self._rows.clear()
        self._nonfinite.clear()
        self._begins_unknown = False

    def measured_with(self, places: Collection[int]) -> frozenset[int]:
        """Return places, and those that were measured together with any of them before."""
        overlapping = {self._parts[place].places for place in places if place in self._parts}
        return frozenset(places).union(*overlapping)

    def note(self, places: frozenset[int], row_C: torch.Tensor, *, is_sum: bool = False) -> None:
        """Take the statistics [C] of gradients, in place of those that they had before.

        is_sum: of all backwards of the step, so that it is not known where NaN and Inf began.
        """
        self._begins_unknown = is_sum and len(self._nonfinite) > 1
        self._parts.update(dict.fromkeys(places, _Part(places, row_C)))
        self._rows.append(row_C)

    def found(self) -> OwnGradients | None:
        """Return what the parts come to; None where there is no number."""
        parts = self._different_parts()
        if not parts:
            return None
        self._count_rows()
        total_C = folded_rows(torch.stack([part.row_C for part in parts]))
        norm = scalar_of(total_C[_SUM_SQUARES].clamp(max=float_info.max).sqrt())
        if norm is None:
            return None
        present = [part.row_C for part in parts if part not in self._taken]
        return OwnGradients(
            norm,
            _more(self._elements_taken, present),
            nan if self._begins_unknown else _first_above_zero(self._nonfinite),
            total_C.device,
        )

    def _different_parts(self) -> list[_Part]:
        """Return each part once, in the order in which their parameters were first measured."""
        return list(dict.fromkeys(self._parts.values()))

    def _count_rows(self) -> None:
        if self._nonfinite:
            self._nonfinite[-1] = _more(self._nonfinite[-1], self._rows)
        self._rows.clear()


def _more(elements: Scalar, rows: Sequence[torch.Tensor]) -> Scalar:
    """Return a number of NaN and Inf elements, and those of statistics [C] besides."""
    if not rows:
        return elements
    total_C = folded_rows(torch.stack(list(rows)))
    further = scalar_of(total_C[_NONFINITE[0]] + total_C[_NONFINITE[1]])
    return elements if further is None else add(elements, further)


def _first_above_zero(counts: Sequence[Scalar]) -> Scalar:
    """Return the number, from 1, of the first count above zero; NaN where there is none."""
    device = next((each.device for each in counts if isinstance(each, torch.Tensor)), None)
    if device is None:
        return next((float(place) for place, each in enumerate(counts, 1) if each > 0.0), nan)
    above = torch.stack(
        [
            each if isinstance(each, torch.Tensor) else torch.full((), each, device=device).double()
            for each in counts
        ]
    ).gt(0.0)
    first = above.double().argmax().double() + 1.0
    return first.masked_fill(~above.any(), nan)
