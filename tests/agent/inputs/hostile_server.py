"""A server that answers every request as a test says, and remembers what it was sent."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Send = Callable[[BaseHTTPRequestHandler], None]


class HostileServer(ThreadingHTTPServer):
    """Its handler threads end with the process: some of them send without end."""

    daemon_threads = True
    block_on_close = False
    ended = False
    """Set when the test is over, for answers that would go on."""

    def __init__(self, send: Send) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.send = send
        self.seen: list[tuple[str, str]] = []
        """Path and Authorization of each request."""
        self.forms: list[str] = []

    def handle_error(self, *_: object) -> None:
        """Clients that stop reading are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    server: HostileServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization", "")))
        self.server.send(self)

    def do_POST(self) -> None:
        self.server.forms.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.do_GET()

    def log_message(self, *_: object) -> None:
        return


def answer(body: bytes, status: int = 200, **headers: str) -> Send:
    """Return what sends one whole answer."""

    def send(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return send


@contextmanager
def serving(send: Send) -> Iterator[tuple[HostileServer, int]]:
    """Yield the server and its port."""
    server = HostileServer(send)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, server.server_port
    finally:
        server.ended = True
        server.shutdown()
        thread.join()
        server.server_close()
