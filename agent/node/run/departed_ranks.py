"""Ranks that have been gone for so long that their last numbers are no longer shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.node.collect.rank_source import RankSource
from mp_agent.records.steps import EndReason


@dataclass(slots=True)
class DepartedRanks:
    """Remembers since when the ranks of an attempt are gone."""

    linger_seconds: float
    _gone_since_seconds: dict[int, float] = field(default_factory=dict)

    def look(self, sources: Mapping[int, RankSource], now_seconds: float) -> None:
        """Take in which ranks have gone by this moment."""
        for rank, source in sources.items():
            if source.end is not EndReason.RUNNING:
                self._gone_since_seconds.setdefault(rank, now_seconds)

    def begin_attempt(self) -> None:
        """Forget the ranks: others come under their numbers."""
        self._gone_since_seconds.clear()

    def faded(self, now_seconds: float) -> frozenset[int]:
        """Return the ranks that have been gone for the linger."""
        return frozenset(
            rank
            for rank, since_seconds in self._gone_since_seconds.items()
            if now_seconds - since_seconds >= self.linger_seconds
        )
