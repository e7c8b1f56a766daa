"""Runs are read from flight records and from node agents, or refused by name."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from click.testing import CliRunner

from mp_agent.cli import main
from mp_agent.errors import CompareError, FlightError
from mp_agent.flight.postmortem.diagnosis import RunHistory
from mp_agent.runs.command import read_run, series_of_columns
from mp_agent.runs.divergence import series_of_history
from mp_agent.settings import Settings
from tests.agent.flight.builders import calm, layers, make_log, make_node_record, make_segment
from tests.agent.flight.builders import overflow as skipped_step
from tests.agent.flight.record.test_load import put

HISTORY = {"step": [1, 2], "loss": [2.0, None], "grad_norm": [1.0, 0.5], "skipped": [False, True]}


def record(directory, steps=5):
    log = make_log(0, segments=(make_segment(steps, first=1, tables=(1,)),), world_size=1)
    assert make_node_record(log)
    return put(directory, log)


def test_steps_layers_and_marks_of_a_history():
    table = layers(1, {"w": {"sum_squares": 4.0}, "bad": {"nan_elements": 1.0}})
    history = RunHistory(steps=(*calm(2), skipped_step(3, 65536.0, forward=True)), tables=(table,))
    series = series_of_history("a", "/a", history, {})
    assert sorted(series.steps) == [1, 2, 3]
    assert series.steps[3].marks == {"loss_nonfinite", "gradients_nonfinite", "skipped"}
    assert "grad_norm" not in series.steps[3].values and series.steps[1].values["loss"] == 2.02
    assert series.layers[1]["w"] == 2.0 and series.layers[1]["bad"] != series.layers[1]["bad"]


def test_a_flight_record_is_compared_with_itself_by_the_command(tmp_path):
    path = record(tmp_path / "a")
    done = CliRunner().invoke(main, ["compare", str(path), str(path.parent)])
    assert done.exit_code == 0, done.output
    assert "The runs agree from step" in done.output
    page, as_json = tmp_path / "page.html", ["--json"]
    done = CliRunner().invoke(main, ["compare", str(path), str(path), "--html", str(page)])
    assert done.exit_code == 0 and page.read_text().startswith("<!doctype html>")
    document = json.loads(
        CliRunner().invoke(main, ["compare", str(path), str(path), *as_json]).output
    )
    assert document["format"] == "mp_agent run comparison" and document["departures"] == []


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(FlightError, match="nothing: no such file"):
        read_run(str(tmp_path / "nothing"), Settings())
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "x"), str(tmp_path / "y")])
    assert done.exit_code == 2 and "x: no such file" in done.output


@pytest.fixture
def agent():
    runs = [{"run": "llama", "is_root": True, "summary": {"facts": {"precision": "bf16"}}}]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            known = {"/api/v1/snapshot": {"runs": runs}, "/api/v1/history?run=llama": HISTORY}
            body = json.dumps(known.get(self.path, {})).encode()
            self.send_response(200 if self.path in known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", runs
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_node_agent_is_asked_for_its_history(agent):
    address, _ = agent
    for place in (address, f"{address}/?run=llama"):
        series = read_run(place, Settings())
        assert series.name == "llama" and series.facts == {"precision": "bf16"}
        assert dict(series.steps[1].values) == {"loss": 2.0, "grad_norm": 1.0}
        assert series.steps[2].marks == {"skipped"} and "loss" not in series.steps[2].values


def test_a_run_that_a_node_agent_does_not_know_is_named_with_those_that_it_does(agent):
    address, runs = agent
    with pytest.raises(CompareError, match=r"no run 'x' \(known: llama\)"):
        read_run(f"{address}/?run=x", Settings())
    runs.append({"run": "b", "is_root": True})
    with pytest.raises(CompareError, match=r"name one with /\?run= \(known: b, llama\)"):
        read_run(address, Settings())


def test_columns_that_contradict_themselves_are_refused():
    with pytest.raises(CompareError, match="/a: its history cannot be read"):
        series_of_columns("a", "/a", {**HISTORY, "loss": [1.0]}, {})
    with pytest.raises(CompareError, match="/a: its history cannot be read"):
        series_of_columns("a", "/a", {}, {})
