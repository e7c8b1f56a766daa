"""Collects the rows of a step until it is complete or its deadline has passed."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

PENDING_AT_MOST = 4096
"""Open steps; beyond this the oldest close early, so that memory stays bounded."""


@dataclass(slots=True)
class _Pending(Generic[T]):
    since_seconds: float
    items: dict[int, T] = field(default_factory=dict)


@dataclass(slots=True)
class Assembler(Generic[T]):
    """Groups rows by sequence number and closes the groups in ascending order.

    A sequence closes once every rank that can still deliver it has passed it, or when its first
    row has waited `deadline_seconds`. A rank that misses a deadline is not awaited again until it
    delivers something new.
    """

    deadline_seconds: float
    closed_sequence: int = 0
    pending_at_most: int = PENDING_AT_MOST
    late: int = 0
    """Rows that arrived after their sequence was closed."""
    _positions: dict[int, int] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)
    _pending: dict[int, _Pending[T]] = field(default_factory=dict)

    def add(self, rank: int, sequence: int, item: T, now_seconds: float) -> None:
        """Add one rank's row; a row of a closed sequence is counted and ignored."""
        self.advance(rank, sequence)
        if sequence <= self.closed_sequence:
            self.late += 1
            return
        self._given_up.discard(rank)
        pending = self._pending.setdefault(sequence, _Pending(now_seconds))
        pending.items[rank] = item

    def advance(self, rank: int, sequence: int) -> None:
        """Note that this rank will deliver nothing up to `sequence`."""
        self._positions[rank] = max(sequence, self._positions.get(rank, 0))

    def floor(self, ranks: Collection[int]) -> int:
        """Return the sequence up to which no more rows will arrive.

        ranks: those that can still deliver; the others have delivered all they will.
        """
        awaited = [self._positions.get(rank, 0) for rank in ranks if rank not in self._given_up]
        everyone = max(self._positions.values(), default=0)
        below = min(self._pending, default=everyone + 1) - 1
        return max(min([below, *awaited], default=0), self.closed_sequence)

    def close_ready(
        self,
        ranks: Collection[int],
        now_seconds: float,
        *,
        up_to: int | None = None,
        ignore_deadline: bool = False,
    ) -> Iterator[tuple[int, Mapping[int, T]]]:
        """Yield (sequence, rows by rank) of what is complete or overdue, oldest first.

        ranks: those that can still deliver. up_to: the last sequence that may close.
        ignore_deadline: nothing is overdue.
        """
        while self._pending:
            sequence = min(self._pending)
            if up_to is not None and sequence > up_to:
                return
            late_ranks = {rank for rank in ranks if self._positions.get(rank, 0) < sequence}
            waited_seconds = now_seconds - self._pending[sequence].since_seconds
            overdue = waited_seconds >= self.deadline_seconds and not ignore_deadline
            crowded = len(self._pending) > self.pending_at_most
            if late_ranks - self._given_up and not overdue and not crowded:
                return
            self._given_up |= late_ranks
            yield sequence, self._close(sequence)

    def close_all(self) -> Iterator[tuple[int, Mapping[int, T]]]:
        """Yield everything that is pending, oldest first: no more rows will arrive."""
        for sequence in sorted(self._pending):
            yield sequence, self._close(sequence)

    def _close(self, sequence: int) -> Mapping[int, T]:
        self.closed_sequence = sequence
        return self._pending.pop(sequence).items
