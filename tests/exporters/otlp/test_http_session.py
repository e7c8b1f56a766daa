"""Responses over HTTP that are refusals, or explain one."""

import gzip
import os
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import repeat

import pytest

from tests.exporters.otlp.service_loop import started

pytestmark = pytest.mark.usefixtures("short_timeout")

_REJECTED = b"\n\x0b\x08\x07\x12\x07too old"
"""ExportMetricsServiceResponse{partial_success{rejected_data_points: 7, "too old"}}"""
_GZIP = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 302, "headers": {"Location": "/login?key=s3cret"}}, "redirect"),
        ({"headers": {"Content-Type": "text/html"}, "body": b"<html>sign in</html>"}, "web page"),
        ({"body": b"\xff\xff\xff"}, "other than OTLP"),
        ({"body": _REJECTED}, "accepted all but 7: too old"),
        ({"headers": _GZIP, "body": gzip.compress(_REJECTED)}, "accepted all but 7: too old"),
        ({"headers": _GZIP, "body": _REJECTED}, "other than OTLP"),
        ({"headers": _GZIP, "body": gzip.compress(_REJECTED)[:-12]}, "other than OTLP"),
    ],
)
def test_a_refusal_that_looks_like_success_is_a_failure(answer, said, answers, tmp_path, caplog):
    answers(**answer)
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 1
    assert said in caplog.text and "s3cret" not in caplog.text


def test_more_is_not_rejected_than_was_sent(answers, tmp_path):
    # rejected_data_points: 2 ** 63 - 1
    answers(body=b"\n\x0a\x08" + b"\xff" * 8 + b"\x7f")
    with started(tmp_path) as loop:
        loop.push()
    assert 0 < loop.account().rejected < 1000


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        ("application/x-protobuf", b"\x08\x03\x12\x07too old", "too old"),
        (
            "text/plain",
            b"out of order:\n  mp_agent_step\x1b[0m\n",
            "out of order: mp_agent_step?[0m",
        ),
        ("text/html", b"<html>so sorry</html>", ""),
        ("application/x-protobuf", b"\xff\xff\xff", ""),
    ],
)
def test_what_an_error_says_besides_its_status_is_reported(
    content_type, body, said, answers, tmp_path, caplog
):
    answers(status=400, headers={"Content-Type": content_type}, body=body)
    with started(tmp_path) as loop:
        loop.push()
    (record,) = caplog.records
    assert record.getMessage().endswith(f"reason: Bad Request{said and f'; {said}'}")


@pytest.mark.parametrize(
    "answer",
    [
        {"body": b""},
        {"headers": {"Content-Type": "application/json"}, "body": b"{}"},
        {"headers": _GZIP, "body": b""},
        {"headers": _GZIP, "body": gzip.compress(b"")},
        # rejected_data_points: -1
        {"body": b"\n\x0b\x08" + b"\xff" * 9 + b"\x01"},
    ],
)
def test_success_without_a_word_of_otlp_is_success(answer, answers, tmp_path):
    answers(**answer)
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 0 and loop.delivered == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_collector_on_this_machine_gets_pushes_whatever_proxy_there_is(
    host, answers, tmp_path, monkeypatch
):
    endpoint = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.replace("127.0.0.1", host))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with started(tmp_path) as loop:
        loop.push()
    assert loop.account().failures == 0 and loop.delivered == 1


@cache
def _bomb() -> bytes:
    """Return 64 MiB of zeros, packed, without having had them in memory."""
    packing = zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS)
    return b"".join(packing.compress(bytes(1 << 20)) for _ in range(64)) + packing.flush()


def _pieces(kind: str) -> Iterator[bytes]:
    """Yield what a server sends after the status line, without end or very much of it."""
    yield b"Content-Type: application/x-protobuf\r\n"
    if kind == "chunks":
        yield b"Transfer-Encoding: chunked\r\n\r\n"
        yield from repeat(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
    elif kind == "no length":
        yield b"Connection: close\r\n\r\n"
        yield from repeat(bytes(1 << 16))
    elif kind == "packed":
        packed = _bomb()
        yield b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
    else:
        yield b"Connection: close\r\n\r\n"
        for byte in repeat(b"\x00"):  # never a whole second without one
            time.sleep(0.05)
            yield byte


@pytest.fixture
def endless_server(monkeypatch) -> Iterator[Callable[[int, str], list[int]]]:
    """Start a server that answers by a status and pieces; return how much it could send."""
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}"
    )
    sent: list[int] = []
    threads: list[threading.Thread] = []

    def serve(status: int, kind: str) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1 << 20)
                    connection.sendall(b"HTTP/1.1 %d Any\r\n" % status)
                    for piece in _pieces(kind):
                        connection.sendall(piece)
                        sent.append(len(piece))

    def start(status: int, kind: str) -> list[int]:
        threads.append(threading.Thread(target=serve, args=(status, kind)))
        threads[-1].start()
        return sent

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("kind", ["chunks", "no length", "packed", "drops"])
def test_of_an_answer_without_end_only_the_beginning_is_read(
    status, kind, endless_server, tmp_path, caplog
):
    _bomb()
    sent = endless_server(status, kind)
    tracemalloc.start()
    try:
        with started(tmp_path) as loop:
            loop.push()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert loop.account().failures == 1
    assert peak_bytes < 32 << 20
    assert sum(sent) < 32 << 20  # what the system's buffers take included
    if status == 200:
        assert "other than OTLP" in caplog.text
