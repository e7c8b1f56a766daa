"""Two node agents' transports over real HTTP: one pushes, the other is the root."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from mp_agent.node.endpoint import Endpoint
from mp_agent.node.transport import pusher
from mp_agent.node.transport import root_link as link_module
from mp_agent.node.transport.client import ROWS_PATH, PushClient
from mp_agent.node.transport.pusher import Pusher
from mp_agent.node.transport.root_address import RootAddress
from mp_agent.node.transport.root_link import RootLink
from mp_agent.node.transport.service import ReportHandlers
from mp_agent.records.node_report import KnownNode
from mp_agent.records.steps import EndReason
from mp_agent.ring.run_files import root_note_path
from mp_agent.settings import Settings
from tests.agent.node.transport.stubs import StubRun, make_report, named, serving

SETTINGS = Settings(push_interval_seconds=0.05)
NOWHERE = Endpoint("127.0.0.1", 1)


@pytest.fixture
def root(tmp_path: Path) -> StubRun:
    return StubRun(tmp_path / "root", root=True)


@pytest.fixture
def node(tmp_path: Path) -> StubRun:
    return StubRun(tmp_path / "node", root=False)


async def until(link: RootLink, holds: Callable[[], object], what: str) -> None:
    """Tick a link until something holds."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"no success within the time for {what}"
        link.tick(time.monotonic(), NOWHERE)
        await asyncio.sleep(0.01)


@asynccontextmanager
async def port_opener(root: StubRun, client: PushClient, port: int = 0) -> AsyncIterator[RootLink]:
    """Let the root listen, on a port that it has noted down."""
    link = RootLink(root, SETTINGS, client, {})
    async with serving(ReportHandlers(named(link)).routes(), port=port) as endpoint:
        root.note(url=endpoint.url)
        link.tick(time.monotonic(), endpoint)
        yield link


def play(act: Callable[[PushClient], Awaitable[None]]) -> None:
    async def main() -> None:
        client = PushClient(timeout_seconds=2.0)
        try:
            await act(client)
        finally:
            await client.close()

    asyncio.run(main())


def test_reports_reach_the_root_in_their_order_and_are_answered(root, node):
    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            node.note(url=there.own_url())
            node.waiting = [make_report(n) for n in (1, 2, 3)]
            link = RootLink(node, SETTINGS, client, {})
            await until(link, lambda: len(node.receipts) == 3, "three receipts")
        assert [report.position for report in root.received] == [1, 2, 3]
        assert link.pusher.accepted_total == 3
        assert link.view.pushed_bytes > 0
        assert link.view.last_push_unix_seconds is not None
        assert link.view.push_failures == 0

    play(act)


def test_while_the_root_is_away_nothing_is_lost_and_its_return_is_noticed(root, node, caplog):
    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            url = there.own_url()
        node.note(url=url)
        node.waiting = [make_report(1)]
        link = RootLink(node, SETTINGS, client, {})
        await until(link, lambda: link.view.push_failures >= 2, "failures")
        assert node.receipts == []
        port = int(url.rpartition(":")[2])
        async with port_opener(root, client, port):
            await until(link, lambda: node.receipts, "the receipt")
        assert [report.position for report in root.received] == [1]

    with caplog.at_level(logging.INFO):
        play(act)
    assert caplog.text.count("no rows can be pushed") == 1, "once, not at every try"
    assert "no answer: Connection refused; it is retried" in caplog.text
    assert "answers" in caplog.text
    assert "secret" not in caplog.text


def test_a_token_is_known_to_the_root_before_another_node_can_have_it(root, node):
    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            for run in (root, node):
                run.note(url=there.own_url(), created_unix_ns=88, token="next")
            node.waiting = [make_report(1)]
            link = RootLink(node, SETTINGS, client, {})
            await until(link, lambda: node.receipts, "the receipt")
        assert link.view.push_failures == 0
        assert there.view.requests_refused == 0

    play(act)


def test_an_answer_that_cannot_be_read_is_a_line_in_the_log_once(node, caplog):
    async def garbage(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def act(client: PushClient) -> None:
        async with serving([web.post(ROWS_PATH, garbage)]) as endpoint:
            node.note(url=endpoint.url)
            node.waiting = [make_report(1)]
            link = RootLink(node, SETTINGS, client, {})
            await until(link, lambda: link.view.push_failures >= 3, "failures")

    play(act)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "200: its answer: not a receipt: " in line


def test_the_end_is_pushed_at_once_and_then_owed_no_more(root, node):
    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            node.note(url=there.own_url())
            slow = Settings(push_interval_seconds=3600)
            link = RootLink(node, slow, client, {})
            node.waiting = [make_report(1)]
            await until(link, lambda: node.receipts, "the first report")
            assert link.final_report_pending
            assert not link.pusher.final_accepted
            node.waiting, node.end = [make_report(2, final=True)], EndReason.COMPLETED
            await until(link, lambda: link.pusher.final_accepted, "the end")
            assert len(root.received) == 2
            assert not link.final_report_pending

    play(act)


def test_trouble_is_pushed_at_once_but_not_without_end(root, node):
    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            node.note(url=there.own_url())
            link = RootLink(node, Settings(push_interval_seconds=3600), client, {})
            node.waiting = [make_report(1)]
            await until(link, lambda: node.receipts, "the first report")
            node.urgent = True
            for _ in range(30):
                node.waiting = node.waiting or [make_report(2)]
                link.tick(time.monotonic(), NOWHERE)
                await asyncio.sleep(0.01)
            early = len(root.received)
            await until(link, lambda: len(root.received) > early, "the trouble")
            assert early <= 2

    play(act)


def test_rows_that_the_root_refuses_are_not_sent_in_an_endless_loop(root, node):
    async def act(client: PushClient) -> None:
        root.takes = False
        async with port_opener(root, client) as there:
            node.note(url=there.own_url())
            node.waiting = [make_report(1) for _ in range(1000)]
            link = RootLink(node, Settings(push_interval_seconds=3600), client, {})
            await until(link, lambda: len(root.received) >= 3, "three tries")
            await until(link, lambda: not link.pusher.busy, "a pause")
        assert len(root.received) == 3
        assert not link.final_report_pending

    play(act)


def test_a_node_whose_rows_the_root_does_not_take_for_long_says_so_once(
    root, node, caplog, monkeypatch
):
    async def act(client: PushClient) -> None:
        root.takes = False
        async with port_opener(root, client) as there:
            node.note(url=there.own_url())
            node.waiting = [make_report(1) for _ in range(1000)]
            link = RootLink(node, SETTINGS, client, {})
            await until(link, lambda: len(root.received) >= 6, "two pushes")
            assert caplog.text.count("takes no rows") == 0
            monkeypatch.setattr(pusher, "_REFUSED_SECONDS", 0.0)
            await until(link, lambda: "takes no rows of node 1: " in caplog.text, "a line")
            pushed = len(root.received)
            await until(link, lambda: len(root.received) >= pushed + 15, "five more pushes")
        assert caplog.text.count("takes no rows") == 1

    play(act)


def test_a_note_of_another_attempt_is_no_address(root, node):
    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            node.note(url=there.own_url(), asked_by_unix_ns=4_000)
            node.waiting = [make_report(1)]
            link = RootLink(node, SETTINGS, client, {})
            for _ in range(20):
                link.tick(time.monotonic(), NOWHERE)
                await asyncio.sleep(0.01)
            assert root.received == []
            node.note(url=there.own_url())
            await until(link, lambda: root.received, "a report")

    play(act)


def test_when_the_run_goes_on_under_another_root_the_one_that_was_left_is_notified(
    tmp_path, root, node
):
    second = StubRun(tmp_path / "second", root=True)

    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as left, port_opener(second, client) as there:
            node.note(url=left.own_url())
            link = RootLink(node, SETTINGS, client, {})
            node.waiting = [make_report(1)]
            await until(link, lambda: node.receipts, "a receipt of the first root")

            node.session, node.created_unix_ns = "next", frozenset({6_000})
            second.note(url=there.own_url(), created_unix_ns=78, token="other")
            there.tick(time.monotonic(), Endpoint("127.0.0.1", 1))
            node.note(
                asked_by_unix_ns=6_000, url=there.own_url(), created_unix_ns=78, token="other"
            )
            node.waiting = [make_report(1, session="next")]
            await until(link, lambda: left.superseded, "the word to the first root")

    play(act)
    assert not second.received or second.received[0].session == "next"


def test_a_root_that_comes_back_on_another_port_is_followed(root, node):
    """No node can ask where it is; it notifies those that the agent before it knew."""

    async def act(client: PushClient) -> None:
        link = RootLink(node, SETTINGS, client, {})
        async with serving(ReportHandlers(named(link)).routes()) as nodes_server:
            async with port_opener(root, client) as there:
                node.note(url=there.own_url())
                root.nodes = (known(0, there.own_url()), known(1, nodes_server.url))
                there.tick(time.monotonic(), there._endpoint)
            root.nodes = ()
            successor = RootLink(root, SETTINGS, client, {})
            async with serving(ReportHandlers(named(successor)).routes()) as moved:
                assert moved.url != there.own_url()
                successor.tick(time.monotonic(), moved)
                node.waiting = [make_report(1)]
                await until(link, lambda: node.receipts, "the receipt of the successor")
            after_it = RootLink(node, SETTINGS, client, {})
            after_it.tick(time.monotonic(), nodes_server)
            assert after_it._root is not None
            assert after_it._root.url == moved.url, "an agent that is started again knows it too"
            successor.cancel()

    play(act)


def known(number: int, url: str = "", ranks: tuple[int, ...] = ()) -> KnownNode:
    return KnownNode(
        node_rank=number, host="host", url=url, ranks=ranks, active=True, silent_seconds=0.0
    )


def test_without_a_token_nothing_is_sent_and_the_log_says_what_to_set(
    root, node, caplog, monkeypatch
):
    monkeypatch.setattr(link_module, "STORE_SECONDS", 0.05)

    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            url = there.own_url()
            node.note(url=url, token="", problem="no store")
            node.waiting = [make_report(1)]
            link = RootLink(node, SETTINGS, client, {})
            await until(link, lambda: "MP_AGENT_TOKEN" in caplog.text, "the advice")
        assert root.received == []
        assert link.view.push_failures == 0

    play(act)
    assert "no store" in caplog.text


def test_a_root_without_a_token_says_so_but_not_on_a_run_of_one_node(root, caplog, monkeypatch):
    monkeypatch.setattr(link_module, "STORE_SECONDS", 0.05)

    async def act(client: PushClient) -> None:
        link = RootLink(root, SETTINGS, client, {})
        await until(link, lambda: "MP_AGENT_TOKEN" in caplog.text, "the advice")

        caplog.clear()
        single = StubRun(root.run_dir.parent / "single", root=True)
        single.identity = type(single.identity)(
            **{
                **{name: getattr(single.identity, name) for name in single.identity.__slots__},
                "local_world_size": 4,
            }
        )
        alone = RootLink(single, SETTINGS, client, {})
        started = time.monotonic()
        await until(alone, lambda: time.monotonic() - started > 0.3, "a while")
        assert caplog.text == ""
        assert alone.view.nodes_known == 1

    play(act)


def test_a_root_that_hears_nothing_of_other_nodes_says_so_once_and_what_to_set(
    root, caplog, monkeypatch
):
    monkeypatch.setattr(link_module, "STORE_SECONDS", 0.05)
    mistaken = Settings(root="10.1.2.3:9464", token="secret", push_interval_seconds=0.05)

    async def act(client: PushClient) -> None:
        for settings in (Settings(token="secret"), mistaken):
            caplog.clear()
            link = RootLink(root, settings, client, {})
            await until(link, lambda: "have not reported" in caplog.text, "the advice")
            assert ("10.1.2.3:9464" in caplog.text) is bool(settings.root)
            for _ in range(3):
                link.tick(time.monotonic(), NOWHERE)
            assert caplog.text.count("have not reported") == 1

        caplog.clear()
        root.nodes = (known(0, ranks=(0, 1)), known(1, ranks=(2, 3)))
        link = RootLink(root, mistaken, client, {})
        started = time.monotonic()
        await until(link, lambda: time.monotonic() - started > 0.3, "a while")
        assert caplog.text == ""

    play(act)


def test_notes_and_their_files_keep_the_token_to_their_owner(node):
    node.note(url="http://10.0.0.1:9464")
    assert root_note_path(node.run_dir).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("bind", "advertise", "url"),
    [
        ("0.0.0.0", "", "http://10.0.0.7:9464"),
        ("0.0.0.0", "node7.cluster", "http://node7.cluster:9464"),
        ("10.0.0.8", "", "http://10.0.0.8:9464"),
        ("::", "fd00::7", "http://[fd00::7]:9464"),
    ],
)
def test_others_are_given_the_address_that_was_set_or_is_known(node, bind, advertise, url):
    async def act(client: PushClient) -> None:
        node.note(url="http://10.0.0.1:9464", address="10.0.0.7", token="")
        link = RootLink(node, Settings(advertise=advertise), client, {})
        link.tick(0.0, Endpoint(bind, 9464))
        assert node.url == url

    play(act)


def test_agents_that_start_together_do_not_push_together(root, tmp_path):
    async def act(client: PushClient) -> None:
        async with port_opener(root, client) as there:
            nodes = [StubRun(tmp_path / f"node{number}", root=False) for number in range(20)]
            pushers = [Pusher(node, client, 1000.0) for node in nodes]
            for node, pusher in zip(nodes, pushers, strict=True):
                node.waiting = [make_report(1)]
                pusher.tick(RootAddress(url=there.own_url(), token="secret"), 0.0)
                while pusher.busy:
                    await asyncio.sleep(0.001)
                assert pusher.accepted_total == 1
            due = sorted(pusher._due_seconds for pusher in pushers)
            assert due[-1] - due[0] > 300

    play(act)
