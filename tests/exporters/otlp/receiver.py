"""A real HTTP server that takes OTLP, or gives a chosen answer instead."""

import gzip
import ssl
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_TYPES: Mapping[str, tuple[type[Message], type[Message]]] = {
    "metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
    "logs": (ExportLogsServiceRequest, ExportLogsServiceResponse),
    "traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
}
_DECODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
    "": lambda body: body,
}


@dataclass(frozen=True)
class Answer:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """None: the proper one."""
    after: threading.Event | None = None
    """Answer only once this is set."""


@dataclass(frozen=True)
class Posted:
    path: str
    headers: Mapping[str, str]
    message: Any


class OtlpReceiver:
    """Keeps what was posted, accepted or not; use as a context manager."""

    def __init__(self, *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.answer: Callable[[str], Answer] = lambda path: Answer()
        """From the path of a request to what it is answered."""
        self.judge: Callable[[Posted], Answer | None] = lambda posted: None
        """From a request to what it is answered; None where that is up to `answer`."""
        self.posted: list[Posted] = []
        """Everything that arrived, whatever the answer was."""
        self.accepted: list[Posted] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver._take(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> "OtlpReceiver":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more; may be called before the context ends."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def messages(self, signal: str = "metrics") -> list[Any]:
        """Return the accepted requests of a signal."""
        kind = _TYPES[signal][0]
        return [posted.message for posted in self.accepted if isinstance(posted.message, kind)]

    def _take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        request, response = _TYPES[handler.path.partition("?")[0].rsplit("/", 1)[-1]]
        decode = _DECODERS[handler.headers.get("Content-Encoding", "")]
        headers = {name.lower(): value for name, value in handler.headers.items()}
        posted = Posted(handler.path, headers, request.FromString(decode(body)))
        self.posted.append(posted)
        answer = self.judge(posted) or self.answer(handler.path)
        if answer.after is not None:
            answer.after.wait(30)
        if answer.status == 200 and answer.body is None:
            self.accepted.append(posted)
        content = response().SerializeToString() if answer.body is None else answer.body
        fields = {"Content-Type": "application/x-protobuf", **answer.headers}
        try:
            handler.send_response(answer.status)
            for name, value in fields.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
        except OSError:
            handler.close_connection = True
