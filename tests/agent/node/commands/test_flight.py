"""The commands: what they print, and how they refuse."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mp_agent.node.commands.flight import dump_command, postmortem_command
from mp_agent.ring import locations


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MP_AGENT_FLIGHT_DIR", str(tmp_path / "flight"))
    monkeypatch.setenv("MP_AGENT_DIR", str(tmp_path / "shm"))

    def call(command, *arguments: object):
        return CliRunner().invoke(command, [str(argument) for argument in arguments])

    return call


def test_a_dead_run_is_dumped_from_its_rings_and_reported(start_rank, run_dir, call, tmp_path):
    rank = start_rank()
    rank.steps(30, loss=2.0)
    rank.kill()
    dumped = call(dump_command, "--run", "llama")
    assert dumped.exit_code == 0
    record = Path(dumped.output.strip())
    assert record.is_relative_to(tmp_path / "flight")
    for place in (run_dir, record, record.parent, record.parent.parent):
        result = call(postmortem_command, place)
        assert result.exit_code == 0, result.output
        assert "Ranks were killed from outside" in result.output


def test_a_live_run_without_a_node_agent_is_dumped_and_undisturbed(start_rank, run_dir, call):
    rank = start_rank()
    rank.steps(30)
    dumped = call(dump_command)
    assert dumped.exit_code == 0
    rank.steps(1)
    assert rank.running and len(locations.find_rings(run_dir)) == 1


def test_the_document_and_the_page_are_written(start_rank, run_dir, call, tmp_path):
    start_rank().steps(30, loss=2.0)
    document = call(postmortem_command, run_dir, "--json")
    assert json.loads(document.output)["run"]["name"] == "llama"
    page = tmp_path / "page.html"
    assert call(postmortem_command, run_dir, "--html", page).output.strip() == str(page)
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "prepare",
    [
        lambda place: None,
        lambda place: place.mkdir(),
        lambda place: place.write_bytes(b"PK\x03\x04"),
        lambda place: (place.mkdir(), (place / "node0.npz").write_bytes(b"")),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_the_path(call, tmp_path, prepare):
    place = tmp_path / "place"
    prepare(place)
    result = call(postmortem_command, place)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"mp-agent postmortem: {place}")


def test_a_directory_of_several_runs_is_refused(start_rank, run_dir, call):
    start_rank().steps(3)
    result = call(postmortem_command, run_dir.parent)
    assert result.exit_code == 2
    assert "holds several runs; name one of them: llama-" in result.output


def test_a_ring_that_is_damaged_is_refused_by_name(run_dir, call):
    attempt = run_dir / "launcher-0"
    attempt.mkdir(parents=True)
    (attempt / "rank0.ring").write_bytes(b"MPAGRING" + bytes(100))
    result = call(postmortem_command, run_dir)
    assert result.exit_code == 2 and "rank0.ring: truncated" in result.output


def test_a_run_that_is_not_here_cannot_be_dumped(call, tmp_path):
    dumped = call(dump_command, "--run", "elsewhere")
    assert dumped.exit_code == 2
    assert "holds no run 'elsewhere'" in dumped.output


def test_a_page_that_cannot_be_written_is_refused(start_rank, run_dir, call, tmp_path):
    start_rank().steps(3)
    result = call(postmortem_command, run_dir, "--html", tmp_path / "missing" / "page.html")
    assert result.exit_code == 2
    assert "page.html cannot be written" in result.output


def test_thresholds_can_be_set_as_for_the_alerts(start_rank, run_dir, call):
    rank = start_rank()
    for step in range(160):
        norm = 1.0 if step < 60 else 1e-7
        rank.steps(1, gradients={"elements": 4.0, "sum_squares": norm**2}, loss=2.0 + step % 5 / 50)

    def causes(*arguments: str) -> list[str]:
        document = call(postmortem_command, run_dir, "--json", *arguments)
        assert document.exit_code == 0, document.output
        return [finding["cause"] for finding in json.loads(document.output)["findings"]]

    assert causes() == []
    assert causes("--set", "grad_norm_vanished_steps=60") == ["gradient_vanishing"]
    refused = call(postmortem_command, run_dir, "--set", "grad_norm_high=2000")
    assert refused.exit_code == 2
    assert "grad_norm_high has value 2000.0; it must be below grad_norm_extreme" in refused.output
