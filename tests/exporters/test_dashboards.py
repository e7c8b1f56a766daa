"""`mp-agent dashboards` writes what is committed."""

from pathlib import Path

from click.testing import CliRunner

from mp_agent.exporters.dashboards import dashboards_command

COMMITTED = Path(__file__).parents[2] / "grafana" / "dashboards"


def test_the_written_files_are_the_committed_ones(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    result = CliRunner().invoke(dashboards_command, ["--output", str(output)])
    assert result.exit_code == 0, result.output
    written = {path.name: path.read_bytes() for path in output.iterdir()}
    assert written == {path.name: path.read_bytes() for path in COMMITTED.glob("*.json")}
    assert len(written) == 5


def test_without_a_directory_they_are_listed() -> None:
    result = CliRunner().invoke(dashboards_command, [])
    assert "mp-agent-run.json: mp_agent / Run" in result.output


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    result = CliRunner().invoke(dashboards_command, ["--output", str(taken / "x")])
    assert result.exit_code == 1
    assert str(taken) in result.output
