"""Records of single steps of one rank, and its state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite, nan

import numpy as np
import numpy.typing as npt

from mp_agent.records.columns import GRADIENTS, STEP_COLUMN_NAMES

FloatArray = npt.NDArray[np.float64]


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
