"""Records of single steps of one rank, its state, and the steps of a node as arrays.

Steps of a node that differ in their numbers alone are sent, and merged, as arrays. Here are also
the bounds on the numbers and lists that a node agent accepts of another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite, nan
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from mp_agent.records.columns import GRADIENTS, STEP_COLUMN_NAMES

FloatArray = npt.NDArray[np.float64]

UNUSED_GRADIENTS_AT_MOST = 64
"""How often gradients are cleared before any optimizer steps until none is expected to."""
NEVER_STEPPED = (
    f"gradients of an optimizer that has not stepped in {UNUSED_GRADIENTS_AT_MOST} backwards"
)

OTHER_GRADIENTS = "the loss of steps whose gradients are not those of all their backwards"
"""The script puts them together itself, or runs a backward of another model, too."""


class Phase(IntEnum):
    """Phase of a rank; written to the ring's header by each hook. Never renumbered."""

    STARTING = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EVAL = 4
    CHECKPOINT = 5
    OTHER = 6
    """A phase that the user named otherwise."""
    ENDED = 7


class EndReason(IntEnum):
    """How a rank ended, according to its ring. Never renumbered."""

    RUNNING = 0
    COMPLETED = 1
    FAILED = 2
    KILLED = 3
    UNKNOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """One step of one rank. Arrays hold float64; NaN means not observed.

    values: [S] in the order of `Schema.step_columns`.
    families: by name, [G, C] one row per share, columns in the order of `Schema.columns`; those
    that were not measured on this step may be left out.
    """

    sequence: int
    """Steps since the probe attached, from 1; equal on all ranks of a synchronous run."""
    step: int
    """The trainer's own step when `observe(step=…)` gives it, else `sequence`."""
    time_unix_ns: int
    values: FloatArray
    families: Mapping[str, FloatArray]

    @property
    def gradients(self) -> FloatArray:
        """The rows [G, C] of the gradients. Raises KeyError if they were not measured."""
        return self.families[GRADIENTS.name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTable:
    """The layers of one rank at one step, by family: [L, C] in the order of `Schema.layers`.

    Families that were not measured on this step are left out.
    """

    sequence: int
    families: Mapping[str, FloatArray]

    @property
    def gradients(self) -> FloatArray:
        """The rows [L, C] of the gradients. Raises KeyError if they were not measured."""
        return self.families[GRADIENTS.name]

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(rows.nbytes for rows in self.families.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The live part of a ring's header: the rank's current state."""

    phase: Phase
    phase_name: str
    """Lower-case name; the user's own for Phase.OTHER."""
    phase_unix_ns: int
    started_sequence: int
    """Sequence number of the step that the rank is working on."""
    committed_sequence: int
    """Sequence number of the last complete record."""
    end_reason: EndReason
    scrape_wait: bool
    """True while the rank waits at exit for its final state to be exported."""
    probe_errors: int
    setting_errors: int
    records_dropped: int
    probe_seconds: float
    """Host time that the probe has taken since it attached."""
    unsupported: tuple[str, ...] = ()
    """Features in use that the probe cannot measure."""

    @property
    def never_steps(self) -> bool:
        """Whether the rank makes gradients for an optimizer, and has made no step at all."""
        return NEVER_STEPPED in self.unsupported and self.committed_sequence == 0


def step_values(
    scalars: Mapping[str, float], columns: Sequence[str] = STEP_COLUMN_NAMES
) -> FloatArray:
    """Return [S], in the order of `columns`, of what was observed, by column name.

    What was not observed, and what is not finite, becomes NaN; a non-finite loss sets its flag.
    """
    values = {name: value for name, value in scalars.items() if isfinite(value)}
    if "loss" in scalars:
        values["loss_nonfinite"] = float(not isfinite(scalars["loss"]))
    if "skipped" in scalars:
        values["skipped"] = float(scalars["skipped"] > 0)
    return np.array([values.get(name, nan) for name in columns])


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
