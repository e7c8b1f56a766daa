"""What a Prometheus, or a proxy before it, may answer: to backtest, export, compare and doctor."""

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mp_agent.backtest.readers import prometheus as reader
from mp_agent.cli import main
from mp_agent.inputs import http
from tests.agent.inputs.hostile_server import HostileServer, Send, answer, serving

NOW = time.time()
CREDENTIALS = "user:s%65cret"
"""Both spellings must not be shown."""


def data(value: Any) -> bytes:
    return json.dumps({"status": "success", "data": value}).encode()


def matrix(*values: list[Any], **metric: Any) -> bytes:
    series = {"metric": {"__name__": "mp_agent_step", "run": "a", **metric}, "values": values}
    return data({"resultType": "matrix", "result": [series]})


def of_runs(body: bytes, runs: list[str] | None = None) -> Send:
    """Answer with two runs, and with a body to every other question."""
    listed = data(["a", "b"] if runs is None else runs)

    def send(request: BaseHTTPRequestHandler) -> None:
        answer(listed if "label/run" in request.path else body)(request)

    return send


def called(command: str, address: str, directory: Path) -> Result:
    """Call a command that asks a Prometheus."""
    options = {
        "backtest": ["backtest", address, "--start", "10m"],
        "export": ["export", address, "--to", "csv", "--output", str(directory / "runs.csv")],
        "compare": ["compare", "a", "b", "--prometheus", address, "--start", "10m"],
        "doctor": ["doctor", "--prometheus", address, "--scrape", address],
    }[command]
    environ = {"MP_AGENT_DIR": str(directory), "MP_AGENT_PORT": "0", "COLUMNS": "400"}
    return CliRunner(env=environ).invoke(main, options)


COMMANDS = ("backtest", "export", "compare", "doctor")
ODD: dict[str, Send] = {
    "a page": answer(b"<html>please log in</html>"),
    "nothing": answer(b""),
    "null": answer(b"null"),
    "a list": answer(b"[]"),
    "no data": answer(b'{"status": "success"}'),
    "a failure": answer(b'{"status": "error", "error": "boom \\u001b[2J"}'),
    "an error": answer(b'{"status": "error", "error": "boom"}', 422),
    "data of another type": answer(data("text")),
    "runs that are numbers": answer(data([1, 2])),
    "nested too deeply": answer(b'{"status":"success","data":' + b"[" * 100_000),
    "escape sequences": answer(b"\x1b]0;owned\x07 {}", 503),
    "no UTF-8": answer(b'{"status":"success","data":"\xff"}'),
    "a series without labels": of_runs(
        data({"resultType": "matrix", "result": [{"values": [[1, "1"]]}]})
    ),
    "labels that are numbers": of_runs(matrix([NOW, "1"], layer=5)),
    "another result": of_runs(data({"resultType": "vector", "result": []})),
    "a value that is no number": of_runs(matrix([NOW - 60, "many"])),
    "a time of another age": of_runs(matrix([1e300, "1"])),
    "a time with 100 000 digits": of_runs(
        matrix([7, "1"]).replace(b"[[7,", b"[[" + b"7" * 100_000 + b",")
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_odd_answers_end_in_one_line_that_names_the_server_and_no_secret(
    command: str, tmp_path: Path
) -> None:
    for what, send in ODD.items():
        with serving(send) as (_, port):
            result = called(command, f"http://{CREDENTIALS}@127.0.0.1:{port}", tmp_path)
        assert result.exception is None or isinstance(result.exception, SystemExit), what
        assert result.exit_code == (1 if command == "doctor" else 2), (what, result.output)
        assert f"http://127.0.0.1:{port}" in result.output, what
        assert "secret" not in result.output and "s%65cret" not in result.output, what
        assert "\x1b" not in result.output and "\x07" not in result.output, what
        if command != "doctor":
            assert len(result.output.strip().splitlines()) == 1, what
        assert list(tmp_path.glob("*.csv")) + list(tmp_path.glob(".*partial")) == [], what


@pytest.mark.parametrize("command", COMMANDS)
def test_user_and_password_of_the_address_are_sent_decoded(command: str, tmp_path: Path) -> None:
    with serving(answer(b"denied", 401)) as (server, port):
        result = called(command, f"http://{CREDENTIALS}@127.0.0.1:{port}", tmp_path)
    assert "401" in result.output
    # printf 'user:secret' | base64
    assert {authorization for _, authorization in server.seen} == {"Basic dXNlcjpzZWNyZXQ="}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_cannot_be_reached_is_shown_without_its_password(
    command: str, tmp_path: Path
) -> None:
    for address in (
        "http://user:secret@127.0.0.1:1",
        "http://user:secret@host.invalid:1/x?token=secret",
        "http://user:se/cret@127.0.0.1:1",
        "HTTP://user:secret@127.0.0.1:1",
        "http://user:secret@127.0.0.1:port",
    ):
        result = called(command, address, tmp_path)
        assert result.exit_code in (1, 2)
        assert "secret" not in result.output and "se/cret" not in result.output, address
        assert "Traceback" not in result.output


def endless(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"x" * (1 << 16))


def drip(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    assert isinstance(request.server, HostileServer)
    while not request.server.ended:
        request.wfile.write(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("send", "says"), [(endless, "more than 1 MiB"), (drip, "in")])
def test_an_answer_without_end_is_bounded_in_size_and_time(
    command: str,
    send: Send,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "BODY_BYTES_MAX", 1 << 20)
    whole: Callable[..., http.Answer] = http.send

    def impatient(*arguments: Any, **options: Any) -> http.Answer:
        return whole(*arguments, **{**options, "seconds": min(options["seconds"], 1.0)})

    monkeypatch.setattr("mp_agent.inputs.http.send", impatient)
    monkeypatch.setattr("mp_agent.doctor.machine.send", impatient)
    with serving(send) as (_, port):
        result = called(command, f"http://127.0.0.1:{port}", tmp_path)
    assert result.exit_code == (1 if command == "doctor" else 2)
    assert says in result.output


def test_a_range_that_is_too_large_for_one_answer_is_asked_for_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_BYTES_MAX", 4096)
    interval = 15.0

    def send(request: BaseHTTPRequestHandler) -> None:
        assert isinstance(request.server, HostileServer)
        if "label/run" in request.path:
            return answer(data(["a"]))(request)
        form = dict(pair.split("=") for pair in request.server.forms[-1].split("&"))
        begin, end = float(form["start"]), float(form["end"])
        count = int((end - begin) / interval) + 1
        values = [[begin + n * interval, "7"] for n in range(count)]
        return answer(matrix(*values))(request)

    with serving(send) as (server, port):
        found = list(
            reader.samples(f"http://127.0.0.1:{port}", "mp_agent_step", NOW - 3600, NOW, interval)
        )
    assert len({at for at, _, _ in found}) == len(found) == 241
    assert len(server.forms) > 4


def test_a_server_with_countless_runs_is_asked_for_none(tmp_path: Path) -> None:
    with serving(of_runs(matrix(), [f"r{n}" for n in range(2000)])) as (server, port):
        result = called("backtest", f"http://127.0.0.1:{port}", tmp_path)
    assert "has 2000 runs in that time; name one by --run" in result.output
    assert len(server.seen) == 1
