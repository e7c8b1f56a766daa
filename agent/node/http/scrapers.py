"""Who scrapes, how often, and whether they have all seen the end."""

from collections.abc import Set
from dataclasses import dataclass, field

SCRAPERS_AT_MOST = 64
_MISSED_INTERVALS = 3.0
"""A scraper that stays away for so many of its own intervals is not waited for."""


@dataclass(slots=True)
class _Scraper:
    scrapes: int = 0
    last_seconds: float = 0.0
    interval_seconds: float = 0.0


@dataclass(slots=True)
class ScrapeLog:
    """Remembers scrapers by name, to know at the end whom to wait for.

    At most `SCRAPERS_AT_MOST`: a name is what a client says of itself. When there are more, those
    go first that came only once, then the latest comers: a scraper that was there from the
    beginning is not displaced by clients that change their names.
    """

    _scrapers: dict[str, _Scraper] = field(default_factory=dict)

    def record(self, name: str, now_seconds: float) -> None:
        """Take one scrape in."""
        if name not in self._scrapers and len(self._scrapers) >= SCRAPERS_AT_MOST:
            del self._scrapers[self._least_useful(now_seconds)]
        scraper = self._scrapers.setdefault(name, _Scraper())
        if scraper.scrapes:
            scraper.interval_seconds = now_seconds - scraper.last_seconds
        scraper.scrapes += 1
        scraper.last_seconds = now_seconds

    def regulars(self, now_seconds: float) -> set[str]:
        """Return the scrapers that came more than once and are due to come again.

        A person who looks once with curl is none; both of a pair of Prometheus servers are.
        """
        return {
            name
            for name, scraper in self._scrapers.items()
            if scraper.scrapes > 1
            and now_seconds - scraper.last_seconds <= _MISSED_INTERVALS * scraper.interval_seconds
        }

    @property
    def names(self) -> Set[str]:
        """Those that are remembered."""
        return self._scrapers.keys()

    def _least_useful(self, now_seconds: float) -> str:
        """Return who is forgotten next: strangers, then those who stay away, then the newest."""
        regulars = self.regulars(now_seconds)

        def rank(name: str) -> tuple[bool, bool, int]:
            scraper = self._scrapers[name]
            return name in regulars, scraper.scrapes > 1, scraper.scrapes

        return min(self._scrapers, key=rank)
