"""Bounds how often each node may send."""

from dataclasses import dataclass, field

REQUESTS_PER_SECOND = 4.0
REQUESTS_AT_ONCE = 40.0
"""What a node may send after a silence, when it catches up."""


@dataclass(slots=True)
class _Bucket:
    left: float
    filled_seconds: float


@dataclass(slots=True)
class RateLimit:
    """One bucket per sender, refilled with time."""

    per_second: float = REQUESTS_PER_SECOND
    at_once: float = REQUESTS_AT_ONCE
    _buckets: dict[tuple[str, int], _Bucket] = field(default_factory=dict)

    def admits(self, sender: tuple[str, int], now_seconds: float) -> bool:
        """Take one request of a sender in; False when it has sent too many."""
        bucket = self._buckets.setdefault(sender, _Bucket(self.at_once, now_seconds))
        gained = (now_seconds - bucket.filled_seconds) * self.per_second
        bucket.left = min(self.at_once, bucket.left + gained)
        bucket.filled_seconds = now_seconds
        if bucket.left < 1.0:
            return False
        bucket.left -= 1.0
        return True

    def forget(self, run: str) -> None:
        """Drop the senders of a run that is over."""
        for sender in [sender for sender in self._buckets if sender[0] == run]:
            del self._buckets[sender]
