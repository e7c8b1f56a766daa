"""Steps of a node that differ in their numbers alone: those are sent, and merged, as arrays.

And the bounds on the numbers and lists that a node agent accepts of another.
"""

from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from mp_agent.records.steps import FloatArray

STEPS_PER_REPORT = 256
RANKS_MAX = 2**20
NAMES_MAX = 2**20

Rank = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=RANKS_MAX)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Sequence_ = Annotated[int, Meta(ge=0, lt=2**53)]
TrainerStep = Annotated[int, Meta(ge=-(2**53), lt=2**53)]
Digest = Annotated[int, Meta(ge=0, lt=2**32)]


class RowForm(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A `NodeRow` without its numbers."""

    family: Index
    share: Index
    shards: Ranks
    replicas: Ranks
    ranks: Ranks
    places: tuple[Index, ...]
    """The columns that were observed, as places among the family's."""
    compared: bool
    """Whether there is a digest of each shard."""


class StepForm(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A `NodeStep` without its numbers."""

    ranks: Ranks
    holding: Index
    places: tuple[Index, ...]
    """The step columns that were observed, as places in `NodeReport.step_columns`."""
    counts: Ranks
    """By how many ranks, in the same order."""
    rows: tuple[RowForm, ...]
    has_losses: bool = False
    """Whether the losses of the ranks are known."""

    @property
    def first_of_rows(self) -> int:
        """Place of the rows' first value among those of a step."""
        return len(self.places) + len(self.ranks) * (2 if self.has_losses else 1)

    @property
    def width(self) -> int:
        """Number of values of a step."""
        return self.first_of_rows + sum(len(row.places) for row in self.rows)

    @property
    def digests(self) -> int:
        """Number of digests of a step."""
        return sum(len(row.shards) for row in self.rows if row.compared)


class StepBlock(
    Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """S steps of one form, ascending; nothing in them was not finite."""

    form: StepForm
    sequences: Annotated[tuple[Sequence_, ...], Meta(min_length=1, max_length=STEPS_PER_REPORT)]
    steps: Annotated[tuple[TrainerStep, ...], Meta(max_length=STEPS_PER_REPORT)]
    """In the trainer's own count, see `NodeStep.step`."""
    times_unix_seconds: Annotated[tuple[float, ...], Meta(max_length=STEPS_PER_REPORT)]
    values: bytes
    """Little-endian float64, step after step: the step columns, the ranks' seconds of computation
    and their losses, if they are known, and the columns of row after row."""
    digests: bytes = b""
    """Little-endian uint32, step after step, row after row."""

    def array(self) -> FloatArray:
        """Return the values [S, W], without a copy."""
        return np.frombuffer(self.values, "<f8").reshape(len(self.sequences), -1)

    def digest_array(self) -> npt.NDArray[np.uint32]:
        """Return the digests [S, D], without a copy."""
        return np.frombuffer(self.digests, "<u4").reshape(len(self.sequences), -1)
