"""How often the nodes push, which the root chooses by what that costs it; bursts, and limits."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import ceil, inf

LONGEST_SECONDS = 30.0
"""The longest pace that a root asks for. A connection that is idle for longer may be closed."""
BURST_SECONDS = 2.0
"""What comes at once is answered without delay if it takes the root no longer than this."""
BURST_REQUESTS_MIN = 256

_COST_AT_FIRST_SECONDS = 0.5e-3
_WINDOW_SECONDS = 10.0
_WINDOW_REQUESTS = 100
_TOLERANCE = 0.1
"""A pace that differs by less is not worth a change."""
_ROOM = 1.5
"""Requests that are accepted, of those that the pace asks for: to put off more would lose rows."""
_RETURNS_SHARE = 0.75
"""Of the requests that are accepted, for those that were put off: the rest is for new trouble."""
_OWN_SHARE_MAX = 0.5
"""Of the root's share: whatever its own work takes, requests get the rest."""


@dataclass(frozen=True, slots=True)
class Load:
    """What this process has done since it began."""

    processor_seconds: float = 0.0
    own_seconds: float = 0.0
    """Of that, for its own rings and for merging: it depends on the steps, not on the pace."""
    requests: int = 0
    """Pushes of other nodes."""


@dataclass(slots=True)
class PushPace:
    """The time between two pushes of a node, and for how long a longer one may still be followed.

    Times are those of a monotonic clock.
    """

    shortest_seconds: float
    core_share: float
    """Of one core, that the root may take."""
    asked_seconds: float = field(init=False)
    """What receipts ask for."""
    _cost_seconds: float = _COST_AT_FIRST_SECONDS
    _own_share: float = 0.0
    _senders: int = 0
    _mark: tuple[float, Load] | None = None
    _cost_mark: Load = field(default_factory=Load)
    """What had been done when the cost of a request was measured last."""
    _longer: dict[float, float] = field(default_factory=dict)
    """Paces that nodes may still follow, each with the time until which one may."""
    _tokens: float = inf
    _filled_seconds: float = 0.0
    _last_return_seconds: float = 0.0
    _returns: dict[Hashable, float] = field(default_factory=dict)
    """When those that were put off may come again: each is accepted then, whatever else comes."""

    def __post_init__(self) -> None:
        """Start with the shortest."""
        self.asked_seconds = self.shortest_seconds

    def tick(
        self, now_seconds: float, load: Load, senders: int, *, limit_seconds: float = inf
    ) -> None:
        """Choose the pace for so many nodes; limit_seconds: of what steps can be kept open."""
        self._measure(now_seconds, load)
        self._senders = senders
        available = self.core_share - min(self._own_share, _OWN_SHARE_MAX * self.core_share)
        wanted = min(senders * self._cost_seconds / available, LONGEST_SECONDS, limit_seconds)
        wanted = max(wanted, self.shortest_seconds)
        close = abs(wanted - self.asked_seconds) <= _TOLERANCE * self.asked_seconds
        if close and self.asked_seconds <= max(limit_seconds, self.shortest_seconds):
            return
        # Nodes learn of it with their next push, and keep the one before until then.
        self._longer[self.asked_seconds] = now_seconds + self.asked_seconds
        self.asked_seconds = wanted

    def allowed_seconds(self, now_seconds: float) -> float:
        """Return the longest pace that any node may follow by now."""
        self._longer = {pace: end for pace, end in self._longer.items() if end > now_seconds}
        return max(self.asked_seconds, *self._longer, 0.0)

    def put_off_seconds(self, sender: Hashable, now_seconds: float, *, urgent: bool) -> int:
        """Accept a request and return 0, or return in how many seconds it is to come again.

        What exceeds a burst comes back one after the other, as fast as twice the root's share, or
        as the pace needs where that is more, and is accepted then. Half of a burst is for urgent
        requests alone.
        """
        needed = _ROOM * self._senders / self.asked_seconds
        per_second = max(2 * self.core_share / self._cost_seconds, needed)
        depth = max(BURST_SECONDS * per_second, BURST_REQUESTS_MIN)
        gained = (now_seconds - self._filled_seconds) * per_second
        self._tokens, self._filled_seconds = min(depth, self._tokens + gained), now_seconds
        returns = self._returns.pop(sender, inf) <= now_seconds
        if returns or self._tokens >= (1.0 if urgent else 1.0 + depth / 2):
            self._tokens = max(self._tokens - 1.0, 0.0)
            return 0
        after = max(self._last_return_seconds, now_seconds) + 1.0 / (_RETURNS_SHARE * per_second)
        self._last_return_seconds = min(after, now_seconds + LONGEST_SECONDS)
        self._returns[sender] = self._last_return_seconds
        seconds = ceil(self._last_return_seconds - now_seconds)
        self._longer[self.asked_seconds + seconds] = now_seconds + seconds
        return seconds

    def _measure(self, now_seconds: float, load: Load) -> None:
        if self._mark is None:
            self._mark, self._cost_mark = (now_seconds, load), load
            return
        since_seconds, before = self._mark
        elapsed = now_seconds - since_seconds
        # A whole round, in which every node pushes once.
        if elapsed < max(_WINDOW_SECONDS, self.asked_seconds):
            return
        self._mark = (now_seconds, load)
        # Of agents that have ended meanwhile.
        oldest = now_seconds - LONGEST_SECONDS
        self._returns = {sender: at for sender, at in self._returns.items() if at > oldest}
        self._own_share = (load.own_seconds - before.own_seconds) / elapsed
        # Of few nodes over several rounds: else one busy round would count for ever.
        before = self._cost_mark
        requests = load.requests - before.requests
        if requests >= _WINDOW_REQUESTS:
            own = load.own_seconds - before.own_seconds
            cost = (load.processor_seconds - before.processor_seconds - own) / requests
            self._cost_seconds = max((self._cost_seconds + cost) / 2, 1e-6)
            self._cost_mark = load


REQUESTS_PER_SECOND = 4.0
REQUESTS_AT_ONCE = 40.0
"""Requests that a node may send in a burst, to catch up."""


@dataclass(slots=True)
class _Bucket:
    left: float
    filled_seconds: float


@dataclass(slots=True)
class RateLimit:
    """Token bucket per sender."""

    per_second: float = REQUESTS_PER_SECOND
    at_once: float = REQUESTS_AT_ONCE
    _buckets: dict[tuple[str, int], _Bucket] = field(default_factory=dict)

    def admits(self, sender: tuple[str, int], now_seconds: float) -> bool:
        """Count one request of a sender; return False if it has sent too many."""
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
