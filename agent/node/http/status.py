"""What the port shows besides metrics: the status of all runs, for clients, and the runbooks.

The runbooks have the numbers that are in force here.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.pages import as_page, condition_named, index_text, runbook_text
from mp_agent.alerting.site import usable_values
from mp_agent.alerting.values import Values
from mp_agent.catalog.metrics.run import RUNBOOKS
from mp_agent.errors import unknown_name
from mp_agent.exporters.status_page.report import status_page
from mp_agent.settings import Settings

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


Report = Mapping[str, Any]

_REST_PER_WORK = 2.0
"""Cache time relative to the time that a response takes to build."""


class _AnswerCache:
    """Caches the last response for twice the time that it took to build, usually milliseconds."""

    def __init__(self) -> None:
        self._key = ""
        self._text = ""
        self._until_seconds = 0.0

    def text(self, key: str, make: Callable[[], str]) -> str:
        """Return the response for `key`, from the cache if it is still valid."""
        begun_seconds = time.monotonic()
        if key != self._key or begun_seconds >= self._until_seconds:
            self._key, self._text = key, make()
            now_seconds = time.monotonic()
            self._until_seconds = now_seconds + _REST_PER_WORK * (now_seconds - begun_seconds)
        return self._text


def status_routes(
    make_report: Callable[[], Report], make_history: Callable[[str], Report | None]
) -> list[web.RouteDef]:
    """Return the routes of `/`, `/api/v1/snapshot` and `/api/v1/history?run=NAME`.

    make_history: returns the last steps of a run by its name; None if there is no such run.
    """
    last, last_history = _AnswerCache(), _AnswerCache()

    async def snapshot(request: web.Request) -> web.Response:
        return _answer(last.text("", lambda: _text(make_report())))

    async def history(request: web.Request) -> web.Response:
        run = request.query.get("run", "")
        text = last_history.text(run, lambda: _found(make_history(run)))
        if not text:
            return _answer(_text({"error": f"run {run!r} is not known here"}), status=404)
        return _answer(text)

    return [
        web.get("/", _page),
        web.get("/api/v1/snapshot", snapshot),
        web.get("/api/v1/history", history),
    ]


async def _page(request: web.Request) -> web.Response:
    page = status_page()
    return web.Response(body=page.body, headers=page.headers)


def _found(report: Report | None) -> str:
    return "" if report is None else _text(report)


def _text(value: Report) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _answer(text: str, *, status: int = 200) -> web.Response:
    return web.Response(
        text=text,
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )


_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def runbook_routes(settings: Settings) -> list[web.RouteDef]:
    """Return the routes of `/runbooks/`, the list, and `/runbooks/NAME`."""
    values = usable_values(settings, time_scale=settings.time_scale, logged=False)[0]

    async def runbook(request: web.Request) -> web.Response:
        # In a thread: what turns Markdown into HTML is imported by the first request.
        page = await asyncio.to_thread(_runbook_page, request.match_info["name"], values)
        if page is None:
            names = (condition.name for condition in CONDITIONS)
            text = unknown_name(request.match_info["name"], names)
            raise web.HTTPNotFound(text=f"{text}\n")
        return web.Response(text=page, headers=_HEADERS)

    return [web.get(f"{RUNBOOKS}/{{name:[^/]*}}", runbook)]


def _runbook_page(name: str, values: Values) -> str | None:
    if not name:
        return as_page("Runbooks", index_text())
    condition = condition_named(name)
    if condition is None:
        return None
    return as_page(condition.name, runbook_text(condition, values))
