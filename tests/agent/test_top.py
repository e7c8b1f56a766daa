"""`mp-agent top` asks node agents for what the status page shows."""

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from mp_agent.exporters.status_page.report import FORMAT, snapshot_report
from mp_agent.top import top_command
from tests.exporters.status_page.test_report import CONDITION, with_view

RUN = "llama/7b & co"
PASSWORD = base64.b64encode(b"me:secret").decode()


class Agent(BaseHTTPRequestHandler):
    """Answers as a node agent does that asks for a password."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Basic {PASSWORD}":
            self.send_error(401)
            return
        url = urlsplit(self.path)
        source = replace(with_view(conditions=(CONDITION,)), run=RUN)
        answers = {
            "/api/v1/snapshot": snapshot_report([source], {}, 1.0),
            "/api/v1/history": {
                "format": FORMAT,
                "step": [1, 2],
                "loss": [2.5, 2.0],
                "loss_scale": [None, None],
                "grad_norm": [1.0, None],
            },
            "/other/api/v1/snapshot": {"format": FORMAT + 1},
            "/foreign/api/v1/snapshot": ["metrics"],
        }
        if url.path == "/api/v1/history" and parse_qs(url.query) != {"run": [RUN]}:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answers[url.path]).encode())

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Agent)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MP_AGENT_DIR", str(tmp_path))
    monkeypatch.setenv("MP_AGENT_BASIC_AUTH_USER", "me")
    monkeypatch.setenv("MP_AGENT_BASIC_AUTH_PASSWORD", "secret")


def top(*arguments: str) -> Result:
    return CliRunner().invoke(top_command, [*arguments, "--once"])


def test_a_run_is_shown_with_its_history(agent: str) -> None:
    result = top("--url", agent)
    assert result.exit_code == 0, result.output
    assert RUN in result.output
    assert "What to do: Clip." in result.output
    assert "steps 1 to 2" in result.output


def test_a_missing_password_is_reported(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MP_AGENT_BASIC_AUTH_PASSWORD")
    result = top("--url", agent)
    assert result.exit_code == 1
    assert "MP_AGENT_BASIC_AUTH_USER" in result.output


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/foreign", "is not a node agent"), ("/other", f"JSON format {FORMAT + 1}")],
)
def test_what_another_server_answers_is_not_taken_for_a_run(
    agent: str, path: str, expected: str
) -> None:
    result = top("--url", f"http://{agent}{path}")
    assert result.exit_code == 1
    assert expected in " ".join(result.output.split())


def test_an_agent_that_does_not_answer_is_named() -> None:
    result = top("--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "http://127.0.0.1:1 does not answer" in result.output


def test_a_run_that_is_not_there_is_said_so(agent: str) -> None:
    result = top("--url", agent, "--run", "other")
    assert result.exit_code == 1
    assert "knows no run 'other'" in result.output


def test_without_an_agent_on_this_machine_an_address_is_asked_for() -> None:
    result = top()
    assert result.exit_code == 1
    assert "--url" in result.output


def test_json_is_what_the_agents_report_and_a_problem_is_named(agent: str) -> None:
    found = CliRunner().invoke(top_command, ["--url", agent, "--json"])
    assert found.exit_code == 0
    (report,) = json.loads(found.output)
    assert report["url"] == f"http://{agent}" and report["format"] == FORMAT
    assert [run["run"] for run in report["runs"]] == [RUN]
    for arguments, problem in (
        (["--url", agent, "--run", "other"], "knows no run 'other'"),
        (["--url", f"{agent}/foreign"], "is not a node agent, or one of another version"),
    ):
        wrong = CliRunner().invoke(top_command, [*arguments, "--json"])
        assert wrong.exit_code == 1
        assert json.loads(wrong.output)[0]["problem"] == problem
