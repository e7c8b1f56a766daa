"""`mp-agent top` shows a node agent's runs in a terminal."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from mp_agent.exporters.status_page.report import snapshot_report
from mp_agent.exporters.status_page.top import top_command
from tests.exporters.status_page.test_report import CONDITION, with_view


@pytest.fixture
def agent() -> Iterator[str]:
    """Address of a server that answers as a node agent does."""
    source = replace(with_view(conditions=(CONDITION,)), run="[red]llama[/red]")
    body = json.dumps(snapshot_report([source], {}, 1.0)).encode()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/v1/snapshot" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(top_command, [*arguments, "--once"])
    assert result.exit_code == 0, result.output
    return result.output


def test_verdict_remedy_layers_and_ranks_are_shown(agent: str) -> None:
    text = run("--url", agent)
    assert "MpAgentGradientExplosion (critical)" in text
    assert "Clip." in text
    assert "rank" in text
    assert "norm" in text


def test_a_name_with_markup_is_shown_as_it_is(agent: str) -> None:
    assert "[red]llama[/red]" in run("--url", agent)


def test_an_agent_that_does_not_answer_is_named() -> None:
    assert "http://127.0.0.1:1 does not answer" in run("--url", "http://127.0.0.1:1")


def test_a_run_that_is_not_there_is_said_so(agent: str) -> None:
    assert "knows no such run" in run("--url", agent, "--run", "other")


def test_without_an_agent_on_this_machine_an_address_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("MP_AGENT_DIR", str(tmp_path))
    result = CliRunner().invoke(top_command, ["--once"])
    assert result.exit_code == 1
    assert "--url" in result.output
