"""Finds batches that repeat from step to step, or from rank to rank, and those of a single row.

Steps are looked at in pairs of neighbours, some steps apart: batches are the same all the time only
if both the neighbours and the pairs are. An epoch of few batches repeats in its own rhythm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.columns import (
    BATCH_INTERVAL_STEPS,
    BATCH_KEPT,
    BATCH_LOADED,
    LOADED_BY_WORKERS,
)
from mp_agent.records.health import BatchHealth, RepeatedBatch, SharedBatches, SingleRows
from mp_agent.records.merged import MergedStep

_PAIRS = 3
"""Pairs of steps with one and the same batch that are no epochs over a buffer: 33 steps or more."""
_LOOKS = 4
"""Steps looked at, in a row, after which ranks have the same batches, or single rows."""
_CHANGES = 4
"""Steps looked at with another batch than before, after which a run is one of many batches."""
_DOUBLES, _DOUBLE_PAIRS = 2, 8
"""Pairs of steps with the same batch, among the last ones, that are not by chance."""
_USUAL_LOOKS = 6
"""Steps looked at with as many rows, but for one, after which that is usual."""
_USUAL_ROWS = 4.0
"""Rows of a batch from which a batch of one is a mistake."""


@dataclass(slots=True, kw_only=True)
class _Streak:
    """Steps in a row on which a rank was looked at and had one and the same batch."""

    digest: float
    begin: int
    """The trainer's step at its first look."""
    sequence: int
    """Of its last look."""
    pairs: int = 0
    first: bool = True
    """Whether the rank has had no other batch."""
    group: str = ""
    """Ranks that get data of their own for the same part of the model; empty: not known."""


@dataclass(slots=True, kw_only=True)
class BatchTracker(Tracker):
    """Follows the batches of the ranks. Bounded plain data, stored in the ledger."""

    last_step: int = 0
    """Of the last look."""
    streaks: dict[int, _Streak] = field(default_factory=dict)
    changes: dict[int, int] = field(default_factory=dict)
    """How often a rank was seen to have another batch than at the look before."""
    loaded: bool = False
    """Whether a loader of several batches has delivered before each of the last repeats."""
    kept: bool = False
    """Whether any of the last repeats is of the same memory."""
    any_loaded: bool = False
    """Whether such a loader has ever delivered."""
    doubled: list[bool] = field(default_factory=list)
    """Of the last pairs, whether workers have delivered for both the same batch, a new one."""
    alike: list[int] = field(default_factory=list)
    """Ranks that had the batch of another one at every look since `alike_step`."""
    alike_looks: int = 0
    alike_step: int = 0
    rows: dict[int, list[float]] = field(default_factory=dict)
    """The last numbers of rows of each rank, before it had single ones."""
    singles: dict[int, int] = field(default_factory=dict)
    """Looks in a row at which a rank had a single row."""
    usual_rows: float = 0.0
    """Of the other ranks, or of the past, when single rows were seen last."""

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Compare the batches of a step that was looked at."""
        if not step.batches:
            return
        self.last_step = step.step
        self._fold_repeats(step)
        if step.coverage == 1.0:
            self._fold_shared(step)
        self._fold_rows(step)

    def view(self) -> BatchHealth:
        """Return what is sure."""
        doubled = sum(self.doubled)
        return BatchHealth(
            repeated=self._repeated(),
            doubled=doubled if doubled >= _DOUBLES else 0,
            shared=self._shared(),
            single=self._single(),
        )

    def _fold_repeats(self, step: MergedStep) -> None:
        any_repeat = is_new = False
        for rank, (group, digest) in _digests(step).items():
            streak = self.streaks.get(rank)
            if streak is not None and streak.digest == digest:
                neighbour = step.sequence == streak.sequence + 1
                streak.pairs, streak.sequence = streak.pairs + neighbour, step.sequence
                any_repeat |= neighbour
                is_new |= neighbour and streak.pairs == 1
                continue
            self.changes[rank] = self.changes.get(rank, -1) + 1
            self.streaks[rank] = _Streak(
                digest=digest,
                begin=step.step,
                sequence=step.sequence,
                first=streak is None,
                group=group,
            )
        loaded = step.columns.get(BATCH_LOADED)
        if step.sequence % BATCH_INTERVAL_STEPS:
            doubled = is_new and loaded == LOADED_BY_WORKERS
            self.doubled = [*self.doubled[1 - _DOUBLE_PAIRS :], doubled]
        if not any_repeat:
            if step.sequence % BATCH_INTERVAL_STEPS:
                self.loaded, self.kept = True, False
            return
        self.any_loaded |= loaded is not None
        self.loaded &= bool(loaded)
        self.kept |= step.flag(BATCH_KEPT)

    def _repeated(self) -> RepeatedBatch | None:
        """Return the batch that is repeated although there are, or were, others.

        Also on ranks with data for the same part of the model: other stages may get none.

        A training on all of its data at once has no other batch, and keeps it.
        """
        changes: dict[str, int] = {}
        for rank, own in self.streaks.items():
            place = own.group or str(rank)
            changes[place] = max(changes.get(place, 0), self.changes.get(rank, 0))
        ranks = [
            rank
            for rank, own in self.streaks.items()
            if self._is_stuck(own, changes[own.group or str(rank)])
        ]
        if not ranks:
            return None
        begin = max(self.streaks[rank].begin for rank in ranks)
        return RepeatedBatch(
            ranks=tuple(sorted(ranks)),
            step=begin,
            steps=self.last_step - begin + 1,
            of_all=len(ranks) == len(self.streaks),
        )

    def _is_stuck(self, streak: _Streak, changes: int) -> bool:
        if streak.pairs < _PAIRS:
            return False
        had_others = changes >= _CHANGES and not self.kept
        taken_once = streak.first and self.any_loaded
        return self.loaded or had_others or taken_once

    def _fold_shared(self, step: MergedStep) -> None:
        alike = sorted(
            rank
            for group, batches in step.batches.items()
            for ranks in batches.values()
            for rank in ranks
            if group and len(ranks) > 1
        )
        if alike and alike == self.alike:
            self.alike_looks += 1
        else:
            self.alike, self.alike_looks, self.alike_step = alike, int(bool(alike)), step.step

    def _shared(self) -> SharedBatches | None:
        if self.alike_looks < _LOOKS:
            return None
        return SharedBatches(
            ranks=tuple(self.alike),
            step=self.alike_step,
            steps=self.last_step - self.alike_step + 1,
        )

    def _fold_rows(self, step: MergedStep) -> None:
        for rank, rows in step.batch_rows.items():
            if rows != 1.0:
                self.singles.pop(rank, None)
                self.rows[rank] = [*self.rows.get(rank, [])[1 - _USUAL_LOOKS :], rows]
                continue
            usual = _common(self.rows.get(rank, ())) or _common_of_others(step, rank)
            self.singles[rank] = self.singles.get(rank, 0) + 1 if usual >= _USUAL_ROWS else 0
            self.usual_rows = usual or self.usual_rows

    def _single(self) -> SingleRows | None:
        ranks = tuple(sorted(rank for rank, looks in self.singles.items() if looks >= _LOOKS))
        return SingleRows(ranks=ranks, usual_rows=self.usual_rows) if ranks else None


def _digests(step: MergedStep) -> Mapping[int, tuple[str, float]]:
    return {
        rank: (group, digest)
        for group, batches in step.batches.items()
        for digest, ranks in batches.items()
        for rank in ranks
    }


def _common(rows: Sequence[float]) -> float:
    """Return the number of rows that all looks but one had; 0 where there is none."""
    if len(rows) < _USUAL_LOOKS:
        return 0.0
    middle = sorted(rows)[len(rows) // 2]
    return middle if rows.count(middle) >= len(rows) - 1 else 0.0


def _common_of_others(step: MergedStep, rank: int) -> float:
    """Return the number of rows of all others that train on data of their own; 0 if they differ."""
    for group, batches in step.batches.items():
        ranks = {each for alike in batches.values() for each in alike}
        if group and rank in ranks:
            others = {step.batch_rows.get(each, 0.0) for each in ranks - {rank}}
            return others.pop() if len(others) == 1 else 0.0
    return 0.0
