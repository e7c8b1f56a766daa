"""Runbooks as a node agent serves them: of every alert, for any way to write its name."""

import asyncio
import re
import socket

import aiohttp
import pytest

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.links import runbook_url
from mp_agent.node.http.server import Exposure, MetricsServer
from mp_agent.node.http.status import runbook_routes
from mp_agent.settings import Settings
from tests.exporters.otlp.samples import everything


def fetched(paths: list[str], settings: Settings | None = None) -> dict[str, tuple[int, str]]:
    """Return status and text of each path."""

    async def run() -> dict[str, tuple[int, str]]:
        server = MetricsServer(
            lambda: Exposure(everything(), lambda scraper, seconds: None),
            runbook_routes(settings or Settings()),
        )
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with aiohttp.ClientSession() as session:
                return {path: await _get(session, f"{url}{path}") for path in paths}
        finally:
            await server.stop()

    return asyncio.run(run())


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with session.get(url) as answer:
        return answer.status, await answer.text()


def test_every_alert_has_its_page_where_alerts_link_to():
    paths = {runbook_url("/runbooks", each.name): each for each in CONDITIONS}
    for path, (status, page) in fetched(list(paths)).items():
        condition = paths[path]
        assert status == 200, path
        assert f"<h1>{condition.name}</h1>" in page
        assert "<h2>What to do</h2>" in page and "<table>" in page and "<pre><code" in page
        # Nothing outside the agent, and nothing that only the repository has.
        assert not re.search(r'(href|src)="(?!mpagent)', page), path


def test_the_list_links_every_page_and_names_may_be_written_in_any_way():
    names = ["", "MpAgentLossSpike", "mpagentlossspike", "LossSpike", "mpagentlossspike.md"]
    found = fetched([f"/runbooks/{name}" for name in names])
    listed = found.pop("/runbooks/")[1]
    assert all(f'<a href="{each.name.lower()}.md">{each.name}</a>' in listed for each in CONDITIONS)
    assert len(set(found.values())) == 1


def test_the_numbers_are_those_in_force():
    path = "/runbooks/GradientExplosion"
    changed = fetched([path], Settings(alerts={"explosion_window": "59s"}))
    assert "[59s]" in changed[path][1] and "[59s]" not in fetched([path])[path][1]


@pytest.mark.parametrize("name", ["LossSpik", "..%2f..%2fetc%2fpasswd", "a/b"])
def test_a_name_that_is_none_is_refused(name):
    ((status, _),) = fetched([f"/runbooks/{name}"]).values()
    assert status == 404
