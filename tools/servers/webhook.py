"""A webhook receiver for Alertmanager: keeps every alert that arrives."""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Notification:
    """One alert as it arrived: firing or resolved, with its labels and annotations."""

    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    received_unix_seconds: float

    @property
    def name(self) -> str:
        return self.labels["alertname"]

    @property
    def severity(self) -> str:
        return self.labels.get("severity", "")


class WebhookReceiver:
    """An HTTP server on a free loopback port; use it in a `with` block."""

    def __init__(self) -> None:
        self._arrived: tuple[Notification, ...] = ()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    @property
    def arrived(self) -> tuple[Notification, ...]:
        """Everything that arrived so far, in order; repeats of a firing alert included."""
        return self._arrived

    def firing(self, **labels: str) -> tuple[Notification, ...]:
        """Return the first firing notification of each alert with these labels, in order."""
        first: dict[tuple[tuple[str, str], ...], Notification] = {}
        for alert in self._arrived:
            if alert.status == "firing" and labels.items() <= dict(alert.labels).items():
                first.setdefault(tuple(sorted(alert.labels.items())), alert)
        return tuple(first.values())

    def __enter__(self) -> "WebhookReceiver":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, message: Mapping[str, Any]) -> None:
        now = time.time()
        taken = tuple(
            Notification(alert["status"], alert["labels"], alert["annotations"], now)
            for alert in message["alerts"]
        )
        with self._lock:
            self._arrived += taken

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                take(json.loads(self.rfile.read(length)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Say nothing: the caller shows what arrived."""

        return Handler
