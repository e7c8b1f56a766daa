"""Processor time of the root's HTTP server, whose clients are in another thread."""

import asyncio
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlencode

from benchmarks.many_nodes.node import SimulatedNode
from mp_agent.node.endpoint import open_listener
from mp_agent.node.http.server import Exposure, MetricsServer
from mp_agent.node.transport.client import CONTENT_TYPE, ROWS_PATH, PushClient
from mp_agent.node.transport.root_link import RootLink
from mp_agent.node.transport.service import ReportHandlers
from mp_agent.settings import Settings

_TOKEN = "simulation"
_CHUNK_BYTES = 1 << 16


def seconds_per_request(root: SimulatedNode, bodies: Sequence[bytes]) -> float:
    """Push the nodes' reports, node 1's first, over HTTP; return what each takes of the loop.

    Connections are kept, as agents keep theirs.
    """
    return asyncio.run(_measured(root, bodies)) / max(len(bodies), 1)


async def _measured(root: SimulatedNode, bodies: Sequence[bytes]) -> float:
    settings = Settings(token=_TOKEN)
    client = PushClient()
    link = RootLink(root, settings, client, environ={})
    handlers = ReportHandlers({root.name: link}.get)
    server = MetricsServer(_no_exposure, handlers.routes(), handlers.answer_at_once)
    listener = open_listener("127.0.0.1", 0)
    await server.start(listener)
    try:
        requests = [_request(root.name, 1 + index, body) for index, body in enumerate(bodies)]
        begun = time.thread_time()
        await asyncio.to_thread(_post, listener.getsockname()[1], requests)
        return time.thread_time() - begun
    finally:
        await server.stop()
        await client.close()


def _request(run: str, node: int, body: bytes) -> bytes:
    query = urlencode({"run": run, "node": node, "attempt": 0})
    head = (
        f"POST {ROWS_PATH}?{query} HTTP/1.1\r\n"
        "Host: root.cluster.example:9464\r\n"
        f"Authorization: Bearer {_TOKEN}\r\n"
        f"Content-Type: {CONTENT_TYPE}\r\n"
        "Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: Python aiohttp\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _post(port: int, requests: Sequence[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for request in requests:
            connection.sendall(request)
            answer = connection.recv(_CHUNK_BYTES)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the root says {answer[:200]!r}")


def _no_exposure() -> Exposure:
    raise NotImplementedError
