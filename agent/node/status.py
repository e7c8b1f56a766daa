"""The status page and its JSON among the node agent's paths."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from mp_agent.exporters.status_page.page import status_page

Report = Mapping[str, Any]


def status_routes(
    take_report: Callable[[], Report], take_history: Callable[[str], Report | None]
) -> list[web.RouteDef]:
    """Return the routes of `/`, `/api/v1/snapshot` and `/api/v1/history?run=NAME`.

    take_history: from a run's name to its last steps, None when there is no such run.
    """

    async def snapshot(request: web.Request) -> web.Response:
        return _json(take_report())

    async def history(request: web.Request) -> web.Response:
        run = request.query.get("run", "")
        found = take_history(run)
        if found is None:
            return _json({"error": f"run {run!r} is not known here"}, status=404)
        return _json(found)

    return [
        web.get("/", _page),
        web.get("/api/v1/snapshot", snapshot),
        web.get("/api/v1/history", history),
    ]


async def _page(request: web.Request) -> web.Response:
    page = status_page()
    return web.Response(body=page.body, headers=page.headers)


def _json(value: Report, *, status: int = 200) -> web.Response:
    return web.Response(
        text=json.dumps(value, allow_nan=False, separators=(",", ":")),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )
