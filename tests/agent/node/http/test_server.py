"""The HTTP server alone: how often it works for how many clients, and whom it cuts."""

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from mp_agent.node.http import server
from mp_agent.node.http.server import Exposure, MetricsServer
from mp_agent.node.http.status import status_routes
from tests.exporters.otlp.samples import everything


class Exposed:
    """Counts the snapshots that were taken, and the answers that arrived."""

    def __init__(self) -> None:
        self.snapshots = 0
        self.reports = 0
        self.delivered: list[str] = []

    def expose(self) -> Exposure:
        self.snapshots += 1
        return Exposure(everything(), lambda scraper, seconds: self.delivered.append(scraper))

    def report(self) -> dict[str, list[int]]:
        self.reports += 1
        return {"numbers": list(range(200_000))}


def served(clients: Callable[[str], Awaitable[None]]) -> Exposed:
    """Let clients talk to a server, and return what that cost it."""
    exposed = Exposed()

    async def run() -> None:
        routes = status_routes(exposed.report, lambda run: None)
        running = MetricsServer(exposed.expose, routes)
        listener = socket.create_server(("127.0.0.1", 0))
        await running.start(listener)
        try:
            await clients(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            await running.stop()

    asyncio.run(run())
    return exposed


async def _get(session: aiohttp.ClientSession, url: str, **headers: str) -> str:
    async with session.get(url, headers=headers) as answer:
        assert answer.status == 200
        return await answer.text()


def _unbounded() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


def test_a_crowd_that_comes_at_the_same_time_shares_a_rendering() -> None:
    async def crowd(url: str) -> None:
        async with _unbounded() as session:
            bodies = await asyncio.gather(*(_get(session, f"{url}/metrics") for _ in range(200)))
        assert all("mp_agent_steps_total" in body for body in bodies)

    exposed = served(crowd)
    assert exposed.snapshots < 20
    assert len(exposed.delivered) == 200


def test_who_comes_after_another_gets_what_is_new() -> None:
    async def one_after_the_other(url: str) -> None:
        async with _unbounded() as session:
            for _ in range(5):
                await _get(session, f"{url}/metrics")

    assert served(one_after_the_other).snapshots == 5


def test_nothing_is_rendered_for_clients_that_have_gone() -> None:
    async def impatient(url: str) -> None:
        port = int(url.rpartition(":")[2])
        for _ in range(500):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await writer.drain()
            client = writer.get_extra_info("socket")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        async with _unbounded() as session:
            await _get(session, f"{url}/metrics")

    exposed = served(impatient)
    assert exposed.snapshots < 250
    assert exposed.delivered


def test_a_crowd_at_the_status_page_leaves_time_for_the_rings() -> None:
    async def crowd(url: str) -> None:
        async with _unbounded() as session:
            path = f"{url}/api/v1/snapshot"
            texts = await asyncio.gather(*(_get(session, path) for _ in range(100)))
        assert all(text.startswith('{"numbers":[0,1,') for text in texts)

    assert served(crowd).reports < 60


def test_requests_that_are_no_http_are_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def babble(url: str) -> None:
        port = int(url.rpartition(":")[2])
        for noise in (b"\x16\x03\x01\x02\x00", b"GET /\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n\r\n"):
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(noise + b"\r\n\r\n")
                await reader.read()
                writer.close()

    caplog.set_level(logging.INFO)
    served(babble)
    assert caplog.records == []


def test_a_body_that_no_route_reads_is_not_unpacked(caplog: pytest.LogCaptureFixture) -> None:
    async def post(url: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = "GET /metrics HTTP/1.1", "Host: x", "Connection: close", "Content-Encoding: gzip"
        writer.write("\r\n".join((*head, "Content-Length: 3", "", "abc")).encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    # The library would raise when it unpacks what is not packed.
    served(post)
    assert caplog.records == []


def test_a_crowd_of_one_address_does_not_displace_the_connection_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_AT_MOST", 20)

    async def crowd(url: str) -> None:
        port = int(url.rpartition(":")[2])
        quiet, quiet_writer = await asyncio.open_connection(
            "127.0.0.1", port, local_addr=("127.0.0.2", 0)
        )
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        for _, writer in others:
            writer.write(b"G")
        async with _unbounded() as session:
            await _get(session, f"{url}/metrics")
        assert not quiet.at_eof()
        assert sum(reader.at_eof() for reader, _ in others) >= 40
        quiet_writer.close()
        for _, writer in others:
            writer.close()

    served(crowd)


def test_no_answer_names_the_versions_of_what_serves_it() -> None:
    async def ask(url: str) -> None:
        async with _unbounded() as session:
            for path in ("/metrics", "/healthz", "/api/v1/snapshot", "/nothing"):
                async with session.get(f"{url}{path}") as answer:
                    assert "Server" not in answer.headers

    served(ask)
