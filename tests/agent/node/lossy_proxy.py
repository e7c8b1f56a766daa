"""A TCP proxy between node agents that loses, repeats, damages and delays their requests."""

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

GOOD = "delivered"
BAD = ("lost", "unanswered", "damaged", "damaged answer", "repeated", "truncated")
_TIMEOUT_SECONDS = 10.0


class LossyProxy:
    """Serves at `url`, in threads, until the `with` ends; what becomes of a request is random."""

    def __init__(self, seed: int, fates: Sequence[str] = (GOOD, GOOD, *BAD)) -> None:
        self.root_url = ""
        """Where it delivers; nothing gets through before it is set."""
        self.fates = fates
        self.met: Counter[str] = Counter()
        self.hangs = threading.Event()
        """While set, requests are neither delivered nor answered."""
        self.held = 0
        """Requests that have met it hanging."""
        self._chance = random.Random(seed)
        self._earlier: list[tuple[str, dict[str, str], bytes]] = []
        self._closing = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = proxy._carry(self.path, dict(self.headers.items()), body)
                if answer is None:
                    self.close_connection = True
                    return
                status, content = answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "LossyProxy":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _carry(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes] | None:
        """Return the answer; None to close the connection without one."""
        self.held += self.hangs.is_set()
        while self.hangs.is_set() and not self._closing.is_set():
            time.sleep(0.02)
        fate = self._chance.choice(self.fates)
        self.met[fate] += 1
        if fate == "lost" or not self.root_url or self._closing.is_set():
            return None
        if fate == "damaged":
            body = self._damaged(body)
        elif fate == "truncated":
            body = body[: self._chance.randrange(len(body))] if body else body
        answer = self._deliver(path, headers, body)
        if fate in (GOOD, "repeated", "unanswered"):
            self._earlier.append((path, headers, body))
        if fate == "repeated":
            self._deliver(*self._chance.choice(self._earlier))
            answer = self._deliver(path, headers, body)
        if fate == "unanswered" or answer is None:
            return None
        status, content = answer
        return (status, self._damaged(content)) if fate == "damaged answer" else (status, content)

    def _deliver(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes] | None:
        root = urlsplit(self.root_url)
        passed = {name: headers[name] for name in ("Authorization", "Content-Type")}
        connection = http.client.HTTPConnection(root.netloc, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request("POST", path, body, passed)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return None
        finally:
            connection.close()

    def _damaged(self, body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(self._chance.randint(1, 4) if body else 0):
            changed[self._chance.randrange(len(changed))] = self._chance.randrange(256)
        return bytes(changed)
