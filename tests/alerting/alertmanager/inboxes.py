"""Local stand-ins for Slack, PagerDuty, a webhook and a mail server: they keep what arrives."""

import email
import email.policy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any


class Inboxes:
    """Everything that arrived, in order: bodies posted per path, and mails."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.mails: list[EmailMessage] = []
        self.http_url = ""
        self.smarthost = ""

    def at(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in self.posted if where == path]


@contextmanager
def inboxes() -> Iterator[Inboxes]:
    box = Inboxes()
    with (
        _serving(ThreadingHTTPServer, _http_handler(box)) as http_port,
        _serving(_MailServer, _mail_handler(box)) as mail_port,
    ):
        box.http_url = f"http://127.0.0.1:{http_port}"
        box.smarthost = f"127.0.0.1:{mail_port}"
        yield box


class _MailServer(ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def _serving(kind: Any, handler: Any) -> Iterator[int]:
    server = kind(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _http_handler(box: Inboxes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            box.posted.append((self.path, json.loads(body)))
            accepted = self.path == "/pagerduty"
            answer = b'{"status": "success"}' if accepted else b"ok"
            self.send_response(202 if accepted else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


def _mail_handler(box: Inboxes) -> type[StreamRequestHandler]:
    class Handler(StreamRequestHandler):
        """As much of SMTP as it takes to be given mails."""

        def handle(self) -> None:
            self._say("220 test")
            while line := self.rfile.readline().decode().strip():
                verb = line.split()[0].upper()
                if verb == "QUIT":
                    return self._say("221 bye")
                if verb == "DATA":
                    self._say("354 go on")
                    box.mails.append(
                        email.message_from_bytes(self._data(), policy=email.policy.default)
                    )
                self._say("250 ok")

        def _data(self) -> bytes:
            lines = []
            while (line := self.rfile.readline()) != b".\r\n":
                lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
            return b"".join(lines)

        def _say(self, text: str) -> None:
            self.wfile.write(text.encode() + b"\r\n")

    return Handler
