"""Tracks scrapers and their intervals, to know which to wait for at the end."""

from collections.abc import Set
from dataclasses import dataclass, field

SCRAPERS_AT_MOST = 64
_MISSED_INTERVALS = 3.0
"""A scraper that misses this many of its intervals is not awaited."""


@dataclass(slots=True)
class _Scraper:
    scrapes: int = 0
    last_seconds: float = 0.0
    interval_seconds: float = 0.0


@dataclass(slots=True)
class ScrapeLog:
    """Remembers scrapers by name, to know at the end which to wait for.

    At most `SCRAPERS_AT_MOST`, since clients choose their names. Beyond that, those that came only
    once are dropped first, then the newest: clients that change their names do not displace an
    established scraper.
    """

    _scrapers: dict[str, _Scraper] = field(default_factory=dict)

    def record(self, name: str, now_seconds: float) -> None:
        """Record one scrape."""
        if name not in self._scrapers and len(self._scrapers) >= SCRAPERS_AT_MOST:
            del self._scrapers[self._least_useful(now_seconds)]
        scraper = self._scrapers.setdefault(name, _Scraper())
        if scraper.scrapes:
            scraper.interval_seconds = now_seconds - scraper.last_seconds
        scraper.scrapes += 1
        scraper.last_seconds = now_seconds

    def regulars(self, now_seconds: float) -> set[str]:
        """Return the scrapers that came more than once and are expected again.

        A single request with curl does not count; both servers of a Prometheus pair do.
        """
        return {
            name
            for name, scraper in self._scrapers.items()
            if scraper.scrapes > 1
            and now_seconds - scraper.last_seconds <= _MISSED_INTERVALS * scraper.interval_seconds
        }

    @property
    def names(self) -> Set[str]:
        """Names of the remembered scrapers."""
        return self._scrapers.keys()

    def _least_useful(self, now_seconds: float) -> str:
        """Return the scraper to drop next: one-time ones, then absent ones, then the newest."""
        regulars = self.regulars(now_seconds)

        def rank(name: str) -> tuple[bool, bool, int]:
            scraper = self._scrapers[name]
            return name in regulars, scraper.scrapes > 1, scraper.scrapes

        return min(self._scrapers, key=rank)
