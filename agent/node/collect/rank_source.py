"""One rank as its ring, marker and lock show it: new records, whether it lives, how it ended."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

import numpy as np

from mp_agent.errors import RingError
from mp_agent.records.columns import GRADIENTS
from mp_agent.records.node_report import RankStatus
from mp_agent.records.schema import RankIdentity, Schema
from mp_agent.records.steps import EndReason, FloatArray, LayerTable, Phase, RankState, StepRecord
from mp_agent.ring.reader import RingReader

_BETWEEN_STEPS = (Phase.EVAL, Phase.CHECKPOINT, Phase.OTHER)
_WORST_FIRST = (EndReason.FAILED, EndReason.KILLED, EndReason.UNKNOWN, EndReason.COMPLETED)


def rank_end(state: RankState, *, alive: bool, exit_status: int | None = None) -> EndReason:
    """Return how a rank ended; RUNNING while it runs.

    An end marker counts although the process may still wait for its last scrape. The exit status
    of a process that is gone takes precedence; one that left neither was killed.
    """
    if not alive and exit_status is not None:
        return EndReason.FAILED if exit_status else EndReason.COMPLETED
    if state.end_reason is not EndReason.RUNNING or alive:
        return state.end_reason
    return EndReason.KILLED


def run_end(ranks: Sequence[EndReason]) -> EndReason:
    """Return how the run ended: the worst of its ranks' ends; RUNNING while one runs."""
    if not ranks or EndReason.RUNNING in ranks:
        return EndReason.RUNNING
    return next(reason for reason in _WORST_FIRST if reason in ranks)


def furthest_behind(ranks: Sequence[RankStatus]) -> RankStatus | None:
    """Return the running rank with the least progress; among equals, the lowest rank.

    Evaluation, checkpointing and other phases count as before the forward pass of a step.
    """
    running = [status for status in ranks if status.end is EndReason.RUNNING]
    fewest = min([status.started_sequence for status in running], default=0)
    behind = (status for status in running if status.started_sequence == fewest)
    return min(behind, key=_progress, default=None)


def _progress(status: RankStatus) -> tuple[int, int]:
    return _place(status), status.rank


def _place(status: RankStatus) -> int:
    return Phase.STARTING if status.phase in _BETWEEN_STEPS else status.phase


log = logging.getLogger("mp_agent.node")

_SCHEMAS_PER_POLL = 256
"""Schema changes that one poll reads; the rest is left to the next poll."""


@dataclass(frozen=True, slots=True, eq=False)
class RingBatch:
    """New rows of a ring under one schema; empty while the schema is None."""

    schema: Schema | None
    steps: Sequence[StepRecord] = ()
    tables: Sequence[LayerTable] = ()
    dropped: int = 0
    """Records that were overwritten before they were read, or do not fit the schema."""


class RankSource:
    """Reads one rank's ring from where it left off."""

    def __init__(
        self, path: Path, reader: RingReader, *, after: int = 0, layers_after: int = 0
    ) -> None:
        self.path = path
        self._reader = reader
        self.identity: RankIdentity = reader.identity
        self.state: RankState = reader.state
        self.schema: Schema | None = None
        self.last: StepRecord | None = None
        self.end = EndReason.RUNNING
        self.gone = False
        """Whether the process is gone and its ring has been read completely."""
        self.position = after
        """Sequence number up to which this rank has delivered everything."""
        self._layers_position = layers_after
        self._version = 0
        """Version of the ring that was read last."""

    @property
    def alive(self) -> bool:
        """Whether the process is alive right now."""
        return not self.gone and self._reader.writer_alive()

    def poll(self) -> list[RingBatch]:
        """Return what is new, and update `state`, `end` and `last`.

        A ring that can no longer be read is abandoned: the rank counts as gone, its end as unknown.
        """
        batches: list[RingBatch] = []
        try:
            batches.extend(self._new_batches())
        except (RingError, OSError, ValueError) as error:
            log.error("rank %d: its ring is abandoned: %s", self.identity.rank, error)
            self.end, self.gone = EndReason.UNKNOWN, True
            batches.append(RingBatch(self.schema, dropped=1))
        return batches

    def close(self) -> None:
        """Close the ring."""
        self._reader.close()

    def _new_batches(self) -> Iterator[RingBatch]:
        """Yield what is new, one batch per schema: the reader goes through them in order."""
        if self.gone:
            return
        alive, version = self._reader.writer_alive(), self._reader.version
        if alive and version == self._version:
            return
        for _ in range(_SCHEMAS_PER_POLL):
            yield self._read(alive=alive)
            if self._reader.schema is self.schema:
                self.gone, self._version = not alive, version
                return
        self.end = EndReason.RUNNING  # there is more to read

    def _read(self, *, alive: bool) -> RingBatch:
        """Read the records of one schema; the reader then moves on to the next one.

        The lock was checked before the records are read, so a dead rank's records are complete.
        """
        self.state = self._reader.state
        exit_status = None if alive else self._reader.exit_status
        self.end = rank_end(self.state, alive=alive, exit_status=exit_status)
        self.schema = self._reader.schema
        if self.position and self.last is None:
            self._recall()
        steps, lost = self._reader.steps_after(self.position)
        tables = self._reader.layers_after(self._layers_position)
        if not alive:
            last = steps[-1].sequence if steps else self.position
            recovered, their_tables = self._reader.recovered(last)
            steps, tables = [*steps, *recovered], [*tables, *their_tables]
            steps = [*steps, *self._interrupted(steps)]
        return self._fitting(steps, tables, lost)

    def _recall(self) -> None:
        """Find the last record that an earlier node agent has already counted."""
        steps, _ = self._reader.steps_after(self.position - 1)
        self.last = next((step for step in steps if step.sequence == self.position), None)

    def _interrupted(self, steps: Sequence[StepRecord]) -> list[StepRecord]:
        """Return the step in which a dead rank was killed, if its gradients were measured."""
        record = self._reader.open_record()
        last = steps[-1].sequence if steps else self.position
        if record is None or self.schema is None or record.sequence <= last:
            return []
        return [_settled(record, self.schema)]

    def _fitting(
        self, steps: Sequence[StepRecord], tables: Sequence[LayerTable], lost: int
    ) -> RingBatch:
        if self.schema is None:
            return RingBatch(None, dropped=lost)
        shares, layers = len(self.schema.shares), len(self.schema.layers)
        fitting = [step for step in steps if _fits(step.families, self.schema, shares)]
        whole = [table for table in tables if _fits(table.families, self.schema, layers)]
        if steps:
            self.position = steps[-1].sequence
            self.last = fitting[-1] if fitting else self.last
        if tables:
            self._layers_position = tables[-1].sequence
        return RingBatch(self.schema, fitting, whole, lost + len(steps) - len(fitting))


def _fits(families: Mapping[str, FloatArray], schema: Schema, rows: int) -> bool:
    return all(found.shape == (rows, len(schema.columns(name))) for name, found in families.items())


def _settled(record: StepRecord, schema: Schema) -> StepRecord:
    """Return the record of an interrupted step with `skipped` set if GradScaler would have skipped.

    GradScaler skips a step whose gradients are not finite; otherwise the step would count as an
    update of the weights that never took place.
    """
    columns = schema.step_columns
    skipped, scale = columns.index("skipped"), columns.index("loss_scale")
    rows_GC = record.families.get(GRADIENTS.name)
    names = schema.columns(GRADIENTS.name)
    counts = [names.index(name) for name in GRADIENTS.nonfinite]
    nonfinite = rows_GC is not None and np.nansum(rows_GC[:, counts]) > 0
    if not isnan(record.values[skipped]) or isnan(record.values[scale]) or not nonfinite:
        return record
    values = record.values.copy()
    values[skipped] = 1.0
    return replace(record, values=values)
