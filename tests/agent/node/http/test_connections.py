"""Clients that stall, stay silent or come in crowds shut out no other client."""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trustme
from aiohttp import web

from mp_agent.node.http import connections
from mp_agent.node.http.connections import AnswerAtOnce, GuardedListener, connections_for
from mp_agent.node.http.server import Exposure, MetricsServer

BODY = b"x" * 8_000_000
"""More than the buffers between two processes hold."""


@asynccontextmanager
async def serving(
    tls: ssl.SSLContext | None = None, *, at_once: AnswerAtOnce | None = None, **limits: float
) -> AsyncIterator[tuple[str, int]]:
    """Serve `/` and `/large` behind a guarded listener with these limits."""

    async def short(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    app = web.Application()
    app.router.add_get("/", short)
    app.router.add_get("/large", large)
    # Waiting for the rest of a request that never comes would exceed the limit of `run`.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, lingering_time=3600.0)
    await runner.setup()
    assert runner.server is not None
    listener = GuardedListener(runner.server, at_once=at_once, **limits)  # type: ignore[arg-type]
    sock = socket.create_server(("127.0.0.1", 0))
    await listener.start(sock, tls)
    try:
        yield sock.getsockname()
    finally:
        listener.close()
        await runner.cleanup()


async def ask(
    address: tuple[str, int], path: str = "/", tls: ssl.SSLContext | None = None
) -> bytes:
    reader, writer = await asyncio.open_connection(*address, ssl=tls)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_requests_are_answered_whole() -> None:
    async def test() -> None:
        async with serving() as address:
            assert (await ask(address)).endswith(b"ok")
            assert (await ask(address, "/large")).endswith(BODY)

    run(test)


async def ask_and_close_the_sending_half(address: tuple[str, int], sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


def test_a_client_that_sends_nothing_more_is_answered_whole_and_then_closed() -> None:
    request = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"

    async def test() -> None:
        async with serving() as address:
            assert (await ask_and_close_the_sending_half(address, request % b"")).endswith(b"ok")
            large = await ask_and_close_the_sending_half(address, request % b"large")
            assert large.endswith(BODY)
            for incomplete in (b"", b"GET / HTTP/1.1\r\n"):
                assert await ask_and_close_the_sending_half(address, incomplete) == b""
            unfinished = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nbegun"
            assert (await ask_and_close_the_sending_half(address, unfinished)).endswith(b"ok")

    run(test)


def test_half_open_connections_beyond_the_limit_push_out_the_oldest_alone() -> None:
    async def test() -> None:
        async with serving(connections_at_most=5) as address:
            silent = [await asyncio.open_connection(*address) for _ in range(20)]
            assert (await ask(address)).endswith(b"ok")
            assert await _was_cut(silent[0][0])
            for _, writer in silent:
                writer.close()

    run(test)


def test_handshakes_that_never_come_push_out_the_oldest_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 300.0)
    authority = trustme.CA()
    of_server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(of_server)
    of_client = ssl.create_default_context()
    authority.configure_trust(of_client)

    async def test() -> None:
        async with serving(of_server, connections_at_most=5) as address:
            silent = [await asyncio.open_connection(*address) for _ in range(20)]
            assert (await ask(address, tls=of_client)).endswith(b"ok")
            assert await _was_cut(silent[0][0])
            for _, writer in silent:
                writer.close()

    run(test)


def test_out_of_descriptors_the_quietest_makes_room() -> None:
    async def test() -> None:
        async with serving() as address:
            kept, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await kept.readuntil(b"ok")).endswith(b"ok")
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            # One more, which the client's own end takes.
            resource.setrlimit(resource.RLIMIT_NOFILE, (_first_free_descriptor() + 1, hard))
            try:
                assert (await ask(address)).endswith(b"ok")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await _was_cut(kept)
            writer.close()

    run(test)


def test_a_connection_that_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)

    async def test() -> None:
        async with serving(idle_seconds_at_most=0.2) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nHost:")
            assert await _was_cut(reader)
            writer.close()

    run(test)


def test_a_scraper_that_takes_nothing_is_cut_and_others_are_served_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)

    async def test() -> None:
        async with serving(idle_seconds_at_most=0.5) as address:
            stalled = socket.create_connection(address)
            stalled.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await ask(address)).endswith(b"ok")
            await asyncio.sleep(1.0)  # Only time shows that the stalled one was given up.
            received = await asyncio.to_thread(_drain, stalled)
            assert received < len(BODY)

    run(test)


def test_answers_that_no_client_reads_push_out_the_one_that_waits_longest() -> None:
    async def test() -> None:
        async with serving(unsent_bytes_at_most=len(BODY)) as address:
            stalled = [socket.create_connection(address) for _ in range(4)]
            for client in stalled:
                client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                # In this order: the answer to the next one begins after this one's.
                assert (await ask(address)).endswith(b"ok")
            received = [await asyncio.to_thread(_drain, client) for client in stalled]
            assert received[0] < len(BODY) < received[-1]

    run(test)


def test_a_single_client_with_more_unread_than_the_limit_is_cut() -> None:
    async def test() -> None:
        async with serving(unsent_bytes_at_most=1000) as address:
            stalled = socket.create_connection(address)
            stalled.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await ask(address)).endswith(b"ok")
            assert await asyncio.to_thread(_drain, stalled) < len(BODY)

    run(test)


def test_unread_answers_that_fill_no_buffer_are_cut_by_the_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)

    async def test() -> None:
        cut = asyncio.Event()

        class Talker(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.WriteTransport)
                transport.set_write_buffer_limits(high=2 * len(BODY))
                transport.write(BODY)

            def connection_lost(self, exc: Exception | None) -> None:
                cut.set()

        listener = GuardedListener(Talker, unsent_bytes_at_most=1000)
        sock = socket.create_server(("127.0.0.1", 0))
        await listener.start(sock)
        with socket.create_connection(sock.getsockname()):
            await cut.wait()
        listener.close()

    run(test)


def test_who_reads_no_answers_gets_no_more_until_all_are_read() -> None:
    asked: list[bytes] = []

    def answer(data: bytes) -> bytes:
        asked.append(data)
        return BODY

    async def test() -> None:
        async with serving(at_once=answer) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"1")
            while not asked:
                await asyncio.sleep(0)
            for number in b"234":
                writer.write(bytes([number]))
                for _ in range(20):  # Of the loop, in which the server would read it.
                    await asyncio.sleep(0)
            assert asked == [b"1"]
            for _ in range(2):
                assert await reader.readexactly(len(BODY)) == BODY
            assert asked == [b"1", b"234"]
            writer.close()

    run(test)


@pytest.mark.slow
def test_a_slow_reader_that_goes_on_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.05)

    async def test() -> None:
        async with serving(idle_seconds_at_most=1.0) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            received = 0
            while chunk := await reader.read(500_000):
                received += len(chunk)
                await asyncio.sleep(0.05)
            assert received > len(BODY)
            writer.close()

    run(test)


def test_every_other_agent_of_a_large_run_keeps_its_connection() -> None:
    async def test() -> None:
        server = MetricsServer(_no_exposure)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener)
        server.expect(200)
        try:
            await _all_stay(listener.getsockname(), connections.CONNECTIONS_AT_MOST + 200)
        finally:
            await server.stop()

    run(test)


def test_descriptors_are_allowed_for_as_far_as_the_system_grants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    granted: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: granted.append(limits))
    assert connections_for(0) == connections.CONNECTIONS_AT_MOST
    assert granted == []

    assert connections_for(1249) == connections.CONNECTIONS_AT_MOST + 2 * 1249
    assert granted[-1][1] == 4096
    assert granted[-1][0] >= connections.CONNECTIONS_AT_MOST + 2 * 1249

    assert connections_for(5000) < 4096
    assert granted[-1] == (4096, 4096)


def _no_exposure() -> Exposure:
    raise NotImplementedError


async def _all_stay(address: tuple[str, int], count: int) -> None:
    pairs = [await asyncio.open_connection(*address) for _ in range(count)]
    for reader, writer in pairs:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 200")
    for _, writer in pairs:
        writer.close()


def _first_free_descriptor() -> int:
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return min(set(range(len(used) + 1)) - used)


async def _was_cut(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionError:
        return True


def _drain(stalled: socket.socket) -> int:
    """Return how many bytes were still to be had until the connection was reset."""
    received = 0
    stalled.settimeout(10)
    try:
        while chunk := stalled.recv(1 << 20):
            received += len(chunk)
    except ConnectionError:
        pass
    finally:
        stalled.close()
    return received
