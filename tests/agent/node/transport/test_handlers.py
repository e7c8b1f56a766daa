"""Reports at a root agent's HTTP server."""

import asyncio
import logging
import threading
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from pydantic import SecretStr

from mp_agent.node.http.connections import Connection
from mp_agent.node.transport import client, service
from mp_agent.node.transport.client import (
    MOVE_PATH,
    RETIRE_PATH,
    ROWS_PATH,
    PushClient,
    Reply,
    pack,
    unpack,
)
from mp_agent.node.transport.pace import RateLimit
from mp_agent.node.transport.root_link import RootLink
from mp_agent.node.transport.service import ReportHandlers
from mp_agent.records.node_report import Layout, NodeReport, layout_digest
from mp_agent.records.reports import decode_receipt
from mp_agent.ring.run_files import read_root_note
from mp_agent.settings import Settings
from tests.agent.node.transport.stubs import StubRun, make_receipt, make_report, named, serving

QUERY = {"run": "llama", "node": "1", "attempt": "77"}
BODY = pack(make_report(1))


def make_run(tmp_path: Path) -> StubRun:
    run = StubRun(tmp_path / "run", root=True)
    run.note(url="http://127.0.0.1:1")
    return run


@pytest.fixture(params=[True, False], ids=["at once", "through the HTTP library"])
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StubRun:
    """Return a root; whether its pushes are answered at once or not, they are answered alike."""
    if not request.param:
        monkeypatch.setattr(ReportHandlers, "answer_at_once", lambda handlers, data: None)
    return make_run(tmp_path)


def named_layers(count: int) -> NodeReport:
    """Return a report of so many layers, which is larger by 36 bytes for each."""
    names = tuple(f"model.layers.{number:05}.mlp.weight" for number in range(count))
    positions = tuple(range(count))
    layout = Layout(digest=layout_digest(names, positions), names=names, positions=positions)
    return make_report(1, layouts=(layout,))


def visit(
    run: StubRun,
    act: Callable[[PushClient, str], Awaitable[Reply]],
    *,
    settings: Settings | None = None,
) -> tuple[Reply, RootLink]:
    """Serve a root's port and let a client act on it."""

    async def meet() -> tuple[Reply, RootLink]:
        client = PushClient()
        link = RootLink(run, settings or Settings(), client, {})
        handlers = ReportHandlers(named(link))
        async with serving(handlers.routes(), at_once=handlers.answer_at_once) as endpoint:
            link.tick(0.0, endpoint)
            try:
                return await act(client, endpoint.url), link
            finally:
                await client.close()

    return asyncio.run(meet())


def push(root: StubRun, token: str = "secret", body: bytes = BODY, **query: str) -> Reply:
    async def act(client: PushClient, url: str) -> Reply:
        return await client.send_rows(url, token, {**QUERY, **query}, body)

    return visit(root, act)[0]


def test_a_report_is_taken_in_and_the_receipt_goes_back(run):
    reply = push(run)
    assert reply.ok
    assert decode_receipt(reply.body) == make_receipt(make_report(1))
    assert run.received == [make_report(1)]


@pytest.mark.parametrize("token", ["", "wrong", "secret2", "secre", "SECRET"])
def test_without_the_token_nothing_is_accepted_or_disclosed(run, token):
    known = push(run, token)
    unknown = push(run, token, run="other")
    assert (known.status, known.reason) == (401, unknown.reason)
    assert run.received == []


def test_a_token_opens_its_own_run_alone(tmp_path, run):
    other = StubRun(tmp_path / "other", root=True, name="other")
    other.note(token="others")

    async def meet() -> list[int]:
        client = PushClient()
        links = [RootLink(r, Settings(), client, {}) for r in (run, other)]
        handlers = ReportHandlers(named(*links))
        async with serving(handlers.routes(), at_once=handlers.answer_at_once) as endpoint:
            for link in links:
                link.tick(0.0, endpoint)
            pairs = (("secret", "llama"), ("secret", "other"), ("others", "llama"))
            replies = [
                await client.send_rows(endpoint.url, token, {**QUERY, "run": name}, BODY)
                for token, name in pairs
            ]
            await client.close()
            return [reply.status for reply in replies]

    assert asyncio.run(meet()) == [200, 401, 401]


def test_with_no_token_at_all_every_request_is_refused(tmp_path):
    run = StubRun(tmp_path / "bare", root=True)
    assert push(run, "").status == 401
    assert push(run, "anything").status == 401


def test_the_token_of_the_settings_opens_too(run):
    async def act(client: PushClient, url: str) -> Reply:
        return await client.send_rows(url, "set", QUERY, BODY)

    reply, _ = visit(run, act, settings=Settings(token=SecretStr("set")))
    assert reply.ok


def test_rows_for_another_attempt_or_for_no_root_wait_with_their_sender(run):
    assert push(run, attempt="78").status == 409
    assert push(run, attempt="0").status == 200
    run.is_root = False
    assert push(run).status == 409


@pytest.mark.parametrize(
    ("query", "named"),
    [({"node": "x"}, "node"), ({"attempt": "-1"}, "attempt"), ({"node": "4"}, "4")],
)
def test_a_query_that_makes_no_sense_is_refused_by_name(run, query, named):
    reply = push(run, **query)
    assert reply.status == 400
    assert named in reply.reason


@pytest.mark.parametrize(
    "body", [b"", b"junk", zlib.compress(b"junk"), pack(make_report(1, run="other"))]
)
def test_what_is_no_report_of_the_run_is_refused_with_the_reason(run, body):
    reply = push(run, body=body)
    assert reply.status == 400
    assert "report" in reply.reason
    assert run.received == []


def test_a_report_that_is_pushed_as_one_of_another_node_is_refused_with_both_numbers(run):
    reply = push(run, node="2")
    assert (reply.status, run.received) == (400, [])
    assert "node 1" in reply.reason
    assert "node 2" in reply.reason


def test_a_small_body_that_unfolds_to_much_is_unpacked_in_a_thread(run, monkeypatch):
    threads: list[threading.Thread] = []

    def noted(body: bytes) -> NodeReport:
        threads.append(threading.current_thread())
        return unpack(body)

    monkeypatch.setattr(service, "unpack", noted)
    report = named_layers(20_000)
    body = pack(report)
    assert len(body) < 2**18
    assert push(run, body=body).ok
    assert run.received == [report]
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_what_is_too_large_is_refused_before_it_is_read(run, monkeypatch):
    monkeypatch.setattr(service, "BODY_BYTES_MAX", 1000)
    assert push(run, body=b"x" * 1001).status == 413

    async def act(client: PushClient, url: str) -> Reply:
        async def pieces():
            for _ in range(3):
                yield b"x" * 500

        # Without a length: only reading shows it.
        headers = {"Authorization": "Bearer secret"}
        url = f"{url}{ROWS_PATH}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, params=QUERY, data=pieces(), headers=headers) as response,
        ):
            return Reply(response.status)

    assert visit(run, act)[0].status == 413


def test_a_bomb_is_refused(run, monkeypatch):
    monkeypatch.setattr(client, "REPORT_BYTES_MAX", 1000)
    assert push(run, body=zlib.compress(b"\0" * 10_000_000)).status == 413


def test_a_node_that_sends_too_often_is_asked_to_wait(run):
    async def act(client: PushClient, url: str) -> Reply:
        for _ in range(100):
            reply = await client.send_rows(url, "secret", QUERY, BODY)
            if not reply.ok:
                body = pack(make_report(1, node_rank=2))
                other = await client.send_rows(url, "secret", {**QUERY, "node": "2"}, body)
                assert other.ok
                return reply
        raise AssertionError("no node is asked to wait")

    reply, _ = visit(run, act)
    assert (reply.status, reply.retry_after_seconds) == (429, 1.0)


def test_a_failure_of_ours_is_one_line_in_the_log_and_no_loss(run, caplog):
    run.failure = ZeroDivisionError("in the merge")
    assert push(run).status == 500
    assert "a report cannot be processed" in caplog.text


def test_what_came_in_and_what_was_refused_is_counted(run):
    async def act(client: PushClient, url: str) -> Reply:
        await client.send_rows(url, "wrong", QUERY, BODY)
        await client.send_rows(url, "secret", QUERY, b"junk")
        return await client.send_rows(url, "secret", QUERY, BODY)

    _, link = visit(run, act)
    assert link.view.requests_refused == 2
    assert link.view.received_bytes == len(BODY) + len(b"junk")


class TestPushesAtOnce:
    """What an agent sends is answered without the HTTP library; all else is left to it."""

    HEAD = (
        f"POST {ROWS_PATH}?run=llama&node=1&attempt=77 HTTP/1.1\r\nHost: root\r\n"
        "Authorization: Bearer secret\r\n"
    )
    PUSH = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY

    @pytest.fixture
    def run(self, tmp_path: Path) -> StubRun:
        return make_run(tmp_path)

    @pytest.fixture
    def handlers(self, run: StubRun) -> ReportHandlers:
        link = RootLink(run, Settings(), PushClient(), {})
        link.tick(0.0, None)
        return ReportHandlers(named(link))

    def test_a_push_is_answered_once_it_is_here_as_a_whole(self, handlers, run):
        parts = {end: handlers.answer_at_once(self.PUSH[:end]) for end in range(21, len(self.PUSH))}
        assert set(parts.values()) == {b""}
        answer = handlers.answer_at_once(self.PUSH)
        assert answer is not None
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert decode_receipt(body) == make_receipt(make_report(1))
        assert run.received == [make_report(1)]

    @pytest.mark.parametrize(
        "data",
        [
            b"GET /metrics HTTP/1.1\r\n\r\n",
            PUSH.replace(b"HTTP/1.1", b"HTTP/1.0"),
            PUSH.replace(b"Bearer secret", b"Bearer wrong"),
            PUSH.replace(b"run=llama", b"run=other"),
            PUSH.replace(b"node=1", b"node=1&node=2"),
            PUSH.replace(b"node=1", b"node=1#2"),
            PUSH.replace(b"node=1", b"node=1&x=a b"),
            PUSH.replace(b" HTTP/1.1", b"  HTTP/1.1"),
            PUSH.replace(b"Host: root\r\n", b""),
            PUSH.replace(b"Host: root", b"Host"),
            PUSH.replace(b"Host: root", b"Host: root\nTransfer-Encoding: chunked"),
            PUSH.replace(b"Host: root", b"Transfer-Encoding: chunked"),
            PUSH.replace(b"Host: root", b"Expect: 100-continue"),
            PUSH.replace(b"Host: root", b"Connection: close"),
            PUSH.replace(b"Host: root", b"Content-Length: 1"),
            PUSH.replace(b"Host: root", b"Host: root\r\n folded"),
            PUSH.replace(b"Content-Length: ", b"Content-Length: +"),
            PUSH.replace(b"Content-Length: ", b"Content-Length: 1000000"),
            PUSH.replace(b"Content-Length: ", b"Content-Length: " + 5000 * b"9"),
            PUSH.replace(b"Content-Length: ", b"Content-Length : "),
            HEAD.encode() + b"\r\n" + BODY,
            HEAD.replace("\r\n", "\n").encode() + b"\n",
            PUSH + b"POST",
            PUSH.replace(b"Host: root", b"Host: " + 9000 * b"r"),
            HEAD.encode() + 9000 * b"r",
        ],
    )
    def test_what_an_agent_does_not_send_is_left_to_the_library(self, handlers, run, data):
        assert handlers.answer_at_once(data) is None
        assert run.received == []

    @pytest.mark.parametrize("place", [b"node=1", b"root"])
    @pytest.mark.parametrize("own", b"\0\1\t\v\x7f\xff")
    def test_control_characters_are_left_to_the_library(self, handlers, run, place, own):
        assert handlers.answer_at_once(self.PUSH.replace(place, b"%s%cx" % (place, own))) is None
        assert run.received == []

    def test_the_layers_of_a_large_model_are_answered_at_once(self, handlers, run):
        report = named_layers(3000)
        body = pack(report)
        head = f"{self.HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
        assert handlers.answer_at_once(head + body).startswith(b"HTTP/1.1 200 OK\r\n")
        assert run.received == [report]

    def test_requests_of_both_kinds_follow_each_other_on_a_connection(self, run):
        other = f"{self.HEAD}X-Other: 1\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY

        async def act(client: PushClient, url: str) -> Reply:
            address = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(*address)
            for request in (self.PUSH, self.PUSH, other, self.PUSH):
                for at in range(0, len(request), 100):
                    writer.write(request[at : at + 100])
                    await asyncio.sleep(0)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                length = int(head.lower().split(b"content-length:")[1].split()[0])
                receipt = decode_receipt(await reader.readexactly(length))
                assert receipt == make_receipt(make_report(1))
            writer.close()
            return Reply(200)

        visit(run, act)
        assert len(run.received) == 4

    def test_a_push_in_many_parts_is_left_to_the_library_which_reads_each_once(self, run):
        looks: list[int] = []

        class Library(asyncio.Protocol):
            received = b""

            def data_received(self, data: bytes) -> None:
                self.received += data

        def incomplete(data: bytes) -> bytes:
            looks.append(len(data))
            return b""

        class Unwritten(asyncio.Transport):
            def write(self, data: bytes | bytearray | memoryview) -> None:
                assert data == b""

        library, request = Library(), self.PUSH + 500 * b"x"
        connection = Connection(library, set(), lambda: None, at_once=incomplete)
        connection.connection_made(Unwritten())
        for at in range(len(request)):
            connection.data_received(request[at : at + 1])
        assert len(looks) <= 64
        assert library.received == request


class TestRetirement:
    def retire(self, run: StubRun, *, attempt: str = "77", token: str = "secret"):
        async def act(client: PushClient, url: str) -> Reply:
            query = {"run": "llama", "attempt": attempt}
            return await client.send_message(url, RETIRE_PATH, token, query)

        return visit(run, act)

    def test_the_root_of_the_attempt_that_was_left_is_the_root_no_more(self, run):
        reply, link = self.retire(run)
        assert reply.ok
        assert link.superseded
        assert not link.collects
        assert push(run).status == 409, "an agent that is started again must know it too"

    def test_the_root_of_another_attempt_stays_the_root(self, run):
        reply, link = self.retire(run, attempt="76")
        assert reply.status == 409
        assert link.collects

    def test_no_one_else_can_do_it(self, run):
        reply, link = self.retire(run, token="wrong")
        assert reply.status == 401
        assert link.collects

    def test_the_next_attempt_of_the_same_node_may_be_root_again(self, run):
        self.retire(run)
        run.created_unix_ns = frozenset({9_000})
        run.session = "second"
        run.note(asked_by_unix_ns=9_000, created_unix_ns=78)
        assert push(run, attempt="78").ok


class TestMove:
    URL = "http://10.0.0.1:9470"

    def move(
        self, run: StubRun, *, attempt: str = "77", token: str = "secret", url: str = URL
    ) -> tuple[int, str]:
        """Return the answer, and where the run's root is then taken to be."""

        async def act(client: PushClient, own_url: str) -> Reply:
            query = {"run": "llama", "attempt": attempt, "url": url}
            return await client.send_message(own_url, MOVE_PATH, token, query)

        reply, _ = visit(run, act)
        note = read_root_note(run.run_dir)
        assert note is not None
        return reply.status, note.url

    @pytest.fixture
    def run(self, tmp_path: Path) -> StubRun:
        run = StubRun(tmp_path / "run", root=False)
        run.note(url="http://10.0.0.1:9464")
        return run

    def test_the_root_is_from_then_on_where_it_says(self, run):
        assert self.move(run) == (200, self.URL)

    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({"token": "wrong"}, 401),
            ({"attempt": "76"}, 409),
            ({"url": "file:///etc/passwd"}, 400),
            ({"url": ""}, 400),
        ],
    )
    def test_is_for_those_who_know_the_token_and_the_attempt(self, run, change, status):
        assert self.move(run, **change) == (status, "http://10.0.0.1:9464")

    def test_is_not_for_a_root(self, run):
        run.is_root = True
        assert self.move(run)[0] == 409


def test_a_sender_that_goes_away_in_the_middle_is_no_error(run, caplog):
    async def act(client: PushClient, url: str) -> Reply:
        address = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(*address)
        head = f"POST {ROWS_PATH}?run=llama&node=1&attempt=77 HTTP/1.1\r\nHost: root\r\n"
        head += "Authorization: Bearer secret\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode() + b"x")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        return await client.send_rows(url, "secret", QUERY, BODY)

    with caplog.at_level(logging.DEBUG):
        assert visit(run, act)[0].ok
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_link_knows_how_many_agents_push_to_it(run, tmp_path):
    client = PushClient()
    assert RootLink(run, Settings(), client, {}).senders == 1
    other = StubRun(tmp_path / "other", root=False)
    assert RootLink(other, Settings(), client, {}).senders == 0


def test_a_node_may_catch_up_and_is_then_held_to_its_rate():
    limit = RateLimit(per_second=2.0, at_once=10.0)
    assert [limit.admits(("llama", 1), 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert [limit.admits(("llama", 1), 1.0) for _ in range(3)] == [True, True, False]


def test_one_node_does_not_use_up_what_another_may_send():
    limit = RateLimit(per_second=1.0, at_once=1.0)
    assert limit.admits(("llama", 1), 0.0)
    assert not limit.admits(("llama", 1), 0.0)
    assert limit.admits(("llama", 2), 0.0)
    assert limit.admits(("gpt", 1), 0.0)


def test_a_run_that_is_over_leaves_nothing():
    limit = RateLimit(per_second=1.0, at_once=1.0)
    limit.admits(("llama", 1), 0.0)
    limit.admits(("gpt", 1), 0.0)
    limit.forget("llama")
    assert limit._buckets.keys() == {("gpt", 1)}
