"""Servers that send without end, too slowly, somewhere else, or no HTTP."""

import time
from http.server import BaseHTTPRequestHandler

import pytest

from mp_agent.inputs import http
from mp_agent.inputs.addresses import address_of
from mp_agent.inputs.http import send
from tests.agent.inputs.hostile_server import HostileServer, Send, answer, serving


def head(request: BaseHTTPRequestHandler, **headers: str) -> None:
    request.send_response(200)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()


def endless(request: BaseHTTPRequestHandler) -> None:
    """Send as much as is read, in chunks."""
    head(request, Transfer_Encoding="chunked")
    while True:
        request.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")


def endless_with_length(request: BaseHTTPRequestHandler) -> None:
    head(request, Content_Length=str(3 << 30))
    while True:
        request.wfile.write(bytes(1 << 16))


@pytest.mark.parametrize("endless", [endless, endless_with_length])
def test_an_answer_without_end_is_read_up_to_the_limit(
    endless: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_BYTES_MAX", 2 << 20)
    with serving(endless) as (_, port):
        found = send(address_of(f"http://127.0.0.1:{port}"), seconds=60)
    assert (found.status, found.too_large) == (0, True)
    assert found.problem == "the answer holds more than 2 MiB"


def drip_body(request: BaseHTTPRequestHandler) -> None:
    head(request, Content_Length="1000000")
    drip(request, b" ")


def drip_head(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    drip(request, b"X: 1\r\n")


def drip(request: BaseHTTPRequestHandler, piece: bytes) -> None:
    """Send a piece often enough for the time-out of a socket."""
    assert isinstance(request.server, HostileServer)
    while not request.server.ended:
        request.wfile.write(piece)
        time.sleep(0.02)


@pytest.mark.parametrize("slow", [drip_body, drip_head])
def test_a_slow_drip_ends_with_the_time_for_all_of_it(slow: Send) -> None:
    with serving(slow) as (_, port):
        found = send(address_of(f"http://127.0.0.1:{port}"), seconds=0.5)
    assert found.status == 0
    assert found.problem in ("no answer within 0.5 s", "no complete answer in time")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_shown_not_followed(status: int) -> None:
    with serving(answer(b"")) as (other, other_port):
        place = f"http://user:secret@127.0.0.1:{other_port}/x?token=secret"
        with serving(answer(b"", status, Location=place)) as (_, port):
            found = send(address_of(f"http://user:pw@127.0.0.1:{port}"), seconds=60)
    assert other.seen == []
    assert found.status == status
    assert f"redirects to http://127.0.0.1:{other_port}/x?token=***" in found.problem


def test_credentials_and_query_of_the_address_are_sent() -> None:
    with serving(answer(b"ok")) as (server, port):
        address = address_of(f"http://us%3Aer:s%40cret@127.0.0.1:{port}/prefix?tenant=a")
        assert send(address, "/x", query="b=1", seconds=60).text == "ok"
        assert send(address, form=b"c=2", seconds=60).ok
    # printf 'us:er:s@cret' | base64
    assert server.seen[0] == ("/prefix/x?tenant=a&b=1", "Basic dXM6ZXI6c0BjcmV0")
    assert server.forms == ["c=2"]


def test_what_does_not_speak_http_is_said_to() -> None:
    def ssh(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"SSH-2.0-OpenSSH\r\n")
        request.close_connection = True

    with serving(ssh) as (_, port):
        found = send(address_of(f"http://127.0.0.1:{port}"), seconds=60)
    assert found.problem.startswith("it does not speak HTTP: ")


def test_an_error_shows_no_credentials() -> None:
    found = send(address_of("http://user:secret@host.invalid:1"), seconds=60)
    assert found.status == 0
    assert "secret" not in found.problem
    refused = send(address_of("http://user:secret@127.0.0.1:1"), seconds=60)
    assert refused.problem == "Connection refused"
