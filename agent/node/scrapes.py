"""Who scrapes, how often, and whether they have all seen the end."""

from dataclasses import dataclass, field

_MISSED_INTERVALS = 3.0
"""A scraper that stays away for so many of its own intervals is not waited for."""


@dataclass(slots=True)
class _Scraper:
    scrapes: int = 0
    last_seconds: float = 0.0
    interval_seconds: float = 0.0


@dataclass(slots=True)
class ScrapeLog:
    """Remembers scrapers by name, to know at the end whom to wait for."""

    _scrapers: dict[str, _Scraper] = field(default_factory=dict)

    def note(self, name: str, now_seconds: float) -> None:
        """Take one scrape in."""
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
