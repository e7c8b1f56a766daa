"""Serves the runbooks of all alerts, with the numbers that are in force here."""

import asyncio

from aiohttp import web

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.pages.served import as_page, condition_named, index_text, runbook_text
from mp_agent.alerting.site import usable_values
from mp_agent.alerting.values import Values
from mp_agent.catalog.metrics.run import RUNBOOKS
from mp_agent.errors import unknown_name
from mp_agent.settings import Settings

_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def runbook_routes(settings: Settings) -> list[web.RouteDef]:
    """Return the routes of `/runbooks/`, the list, and `/runbooks/NAME`."""
    values = usable_values(settings, time_scale=settings.time_scale)[0]

    async def runbook(request: web.Request) -> web.Response:
        # In a thread: what turns Markdown into HTML is imported by the first request.
        page = await asyncio.to_thread(_page, request.match_info["name"], values)
        if page is None:
            names = (condition.name for condition in CONDITIONS)
            text = unknown_name(request.match_info["name"], names)
            raise web.HTTPNotFound(text=f"{text}\n")
        return web.Response(text=page, headers=_HEADERS)

    return [web.get(f"{RUNBOOKS}/{{name:[^/]*}}", runbook)]


def _page(name: str, values: Values) -> str | None:
    if not name:
        return as_page("Runbooks", index_text())
    condition = condition_named(name)
    if condition is None:
        return None
    return as_page(condition.name, runbook_text(condition, values))
