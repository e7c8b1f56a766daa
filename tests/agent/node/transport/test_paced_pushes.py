"""Over real HTTP: nodes push when the root says, and come back when it puts them off."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from mp_agent.node.endpoint import Endpoint
from mp_agent.node.transport.client import ROWS_PATH, URGENT, PushClient
from mp_agent.node.transport.pace import PushPace
from mp_agent.node.transport.root_link import RootLink
from mp_agent.node.transport.service import ReportHandlers
from mp_agent.settings import Settings
from tests.agent.node.transport.stubs import StubRun, make_report, named, serving

SHORTEST_SECONDS = 0.05
SETTINGS = Settings(push_interval_seconds=SHORTEST_SECONDS)
NOWHERE = Endpoint("127.0.0.1", 1)


@pytest.fixture
def root(tmp_path: Path) -> StubRun:
    return StubRun(tmp_path / "root", root=True)


@pytest.fixture
def node(tmp_path: Path) -> StubRun:
    return StubRun(tmp_path / "node", root=False)


def exhausted() -> PushPace:
    """Return the pace of a root that can take in one request a second, and none at present."""
    pace = PushPace(SHORTEST_SECONDS, 0.25e-3)
    while not pace.put_off_seconds("", time.monotonic(), urgent=True):
        pass
    return pace


@asynccontextmanager
async def served(root: StubRun, client: PushClient, pace: PushPace | None) -> AsyncIterator[str]:
    link = RootLink(root, SETTINGS, client, {})
    async with serving(ReportHandlers(named(link), pace).routes()) as endpoint:
        root.note(url=endpoint.url)
        link.tick(time.monotonic(), endpoint)
        yield endpoint.url
        assert link.view.requests_refused == 0


async def until(link: RootLink, holds: Callable[[], object]) -> None:
    while not holds():
        link.tick(time.monotonic(), NOWHERE)
        await asyncio.sleep(0.01)


def play(act: Callable[[PushClient], Awaitable[None]]) -> None:
    async def main() -> None:
        client = PushClient()
        try:
            await asyncio.wait_for(act(client), 120)
        finally:
            await client.close()

    asyncio.run(main())


def test_a_node_takes_the_pace_of_its_root_and_its_own_with_one_that_sets_none(root, node):
    async def act(client: PushClient) -> None:
        link = RootLink(node, SETTINGS, client, {})
        pace = PushPace(SHORTEST_SECONDS, 0.25)
        pace.asked_seconds = 12.5
        async with served(root, client, pace) as url:
            node.note(url=url)
            node.waiting = [make_report(1)]
            await until(link, lambda: node.receipts)
            assert link.pusher.interval_seconds == link.view.push_interval_seconds == 12.5
        async with served(root, client, None) as url:
            node.note(url=url)
            node.waiting = [make_report(2)]
            await until(link, lambda: len(node.receipts) == 2)
            assert link.pusher.interval_seconds == SHORTEST_SECONDS

    play(act)


def test_a_root_cannot_shorten_what_the_node_was_set_to(root, node):
    async def act(client: PushClient) -> None:
        link = RootLink(node, Settings(push_interval_seconds=7.0), client, {})
        async with served(root, client, PushPace(SHORTEST_SECONDS, 0.25)) as url:
            node.note(url=url)
            node.waiting = [make_report(1)]
            await until(link, lambda: node.receipts)
        assert link.pusher.interval_seconds == 7.0

    play(act)


def test_what_is_put_off_arrives_later_and_is_no_failure(root, node, caplog):
    async def act(client: PushClient) -> None:
        link = RootLink(node, SETTINGS, client, {})
        async with served(root, client, exhausted()) as url:
            node.note(url=url)
            node.waiting = [make_report(1), make_report(2)]
            node.urgent = True
            await until(link, lambda: link.view.pushes_put_off)
            assert root.received == []
            for _ in range(20):
                link.tick(time.monotonic(), NOWHERE)
                await asyncio.sleep(0.01)
            assert link.view.pushes_put_off == 1, "trouble does not push again before its time"
            node.urgent = False
            await until(link, lambda: len(node.receipts) == 2)
        assert [report.position for report in root.received] == [1, 2]
        assert link.view.push_failures == 0

    with caplog.at_level(logging.WARNING):
        play(act)
    assert caplog.text == ""


def test_a_server_that_always_puts_off_is_no_root_that_is_well(node, caplog):
    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "1"}, text="maintenance")

    async def act(client: PushClient) -> None:
        link = RootLink(node, SETTINGS, client, {})
        async with serving([web.post(ROWS_PATH, busy)]) as endpoint:
            node.note(url=endpoint.url)
            node.waiting = [make_report(1)]
            for _ in range(4):
                link.pusher._due_seconds = 0.0
                link.tick(time.monotonic(), NOWHERE)
                assert link.pusher._task is not None
                await link.pusher._task
        assert (link.view.pushes_put_off, link.view.push_failures) == (3, 1)

    with caplog.at_level(logging.WARNING):
        play(act)
    assert "503: maintenance" in caplog.text


def test_trouble_that_begins_while_a_report_waits_is_called_urgent(root, node):
    """The report after it carries the trouble, in the same push."""
    queries = []

    class Client(PushClient):
        async def send_rows(self, url, token, query, body):
            queries.append(query)
            node.urgent = True
            return await super().send_rows(url, token, query, body)

    async def act(_: PushClient) -> None:
        client = Client()
        link = RootLink(node, SETTINGS, client, {})
        async with served(root, client, None) as url:
            node.note(url=url)
            node.waiting = [make_report(1), make_report(2)]
            await until(link, lambda: len(node.receipts) == 2)
        await client.close()

    play(act)
    assert [URGENT in query for query in queries] == [False, True]
