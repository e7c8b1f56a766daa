"""`mp-agent tune`: what it proposes quiets healthy runs, and every part of a site takes it."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from mp_agent.alerting.site import site_values
from mp_agent.backtest.log.training_log import Point
from mp_agent.cli import main
from mp_agent.settings import Settings, load_settings
from tests.agent.backtest.builders import broken_points, healthy_points, rows_of

NORM = 1500.0
"""Of two steps of a run that its user calls healthy; 1000 is critical."""


def call(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [command, "--processes", "1", *map(str, arguments)])


def write(path: Path, points) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(points)))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    directory.mkdir()
    points = healthy_points(200)
    for place in (150, 151):
        points[place] = Point(step=place + 1, loss=1.2, grad_norm=NORM, learning_rate=1e-3)
    write(directory / "large.jsonl", points)
    write(directory / "calm.jsonl", healthy_points(120, seed=2))
    write(directory / "broken.jsonl", broken_points(120, 100))
    (tmp_path / "labels.yaml").write_text("large: healthy\ncalm: healthy\nbroken: wrong\n")
    return directory


def tune(runs: Path, *arguments: str | Path) -> Result:
    return call("tune", runs, "--labels", runs.parent / "labels.yaml", *arguments)


@pytest.mark.slow
def test_the_proposal_is_as_far_as_the_runs_need_and_the_margin_further(runs, tmp_path) -> None:
    output, chart = tmp_path / "tuned.yaml", tmp_path / "values.yaml"
    result = tune(runs, "--output", output, "--chart-values", chart, "--margin", "1.5")
    assert result.exit_code == 0, result.output
    assert "2 healthy runs: 1 alarms (warning or worse) now, 0 with the proposal" in result.output
    assert "1 wrong runs: 1 found now, 1 with the proposal" in result.output
    thresholds = yaml.safe_load(output.read_text())["thresholds"]
    assert thresholds == yaml.safe_load(chart.read_text())["rules"]["thresholds"]
    assert "MpAgentGradientExplosion of large; stops at" in output.read_text()
    # What it says of itself is true: at the limit the run is quiet, a little before it is not.
    assert not alarmed(runs / "large.jsonl", thresholds)
    before = {name: value / 1.5 / 1.1 for name, value in thresholds.items()}
    assert alarmed(runs / "large.jsonl", before)


def alarmed(path: Path, thresholds) -> bool:
    texts = (f"--set={name}={value}" for name, value in thresholds.items())
    document = json.loads(call("backtest", path, "--json", *texts).output)
    return document["runs"][0]["worst"] in ("critical", "warning")


@pytest.mark.slow
def test_rules_agents_and_backtests_take_the_file(runs, tmp_path, monkeypatch) -> None:
    output = tmp_path / "tuned.yaml"
    tune(runs, "--output", output)
    thresholds = yaml.safe_load(output.read_text())["thresholds"]
    monkeypatch.setenv("MP_AGENT_CONFIG", str(output))
    settings, ignored = load_settings()
    assert ignored == 0
    assert settings.thresholds == thresholds
    limits = site_values(settings).limits
    assert {name: limits[name] for name in thresholds} == thresholds
    rules = CliRunner().invoke(main, ["rules"])
    assert rules.exit_code == 0 and "MpAgentGradientExplosion" in rules.stdout
    again = call("backtest", runs / "large.jsonl", "--json")
    assert json.loads(again.output)["runs"][0]["worst"] == ""


@pytest.mark.slow
def test_alarms_that_are_allowed_stay(runs, tmp_path) -> None:
    output = tmp_path / "tuned.yaml"
    result = tune(runs, "--false-alarms", "1", "--output", output)
    assert result.exit_code == 0
    assert yaml.safe_load(output.read_text()) == {}
    assert "Nothing has to change." in result.output


def test_alarms_that_no_threshold_stops_become_information(tmp_path) -> None:
    path = write(tmp_path / "run.jsonl", broken_points(200, 199))
    output, chart = tmp_path / "tuned.yaml", tmp_path / "values.yaml"
    result = call("tune", path, "--output", output, "--chart-values", chart)
    assert result.exit_code == 0, result.output
    alerts = yaml.safe_load(output.read_text())["alerts"]
    assert alerts["MpAgentNonFiniteUpdate.critical"] == "info"
    severities = yaml.safe_load(chart.read_text())["rules"]["severities"]
    assert severities["MpAgentNonFiniteUpdate"] == {"critical": "info"}
    assert site_values(Settings(alerts=alerts)).severities


def test_healthy_runs_need_no_change_and_the_margin_is_reported(tmp_path) -> None:
    path = write(tmp_path / "run.jsonl", healthy_points(150))
    result = call("tune", path)
    assert result.exit_code == 0
    assert "Nothing has to change." in result.output
    assert "MpAgentGradientExplosion: no alarm with thresholds 2 times as strict" in result.output


def test_without_a_healthy_run_there_is_nothing_to_tune_by(tmp_path) -> None:
    path = write(tmp_path / "run.jsonl", healthy_points(50))
    labels = tmp_path / "labels.yaml"
    labels.write_text("run: wrong\n")
    result = call("tune", path, "--labels", labels)
    assert result.exit_code == 2
    assert "no run is healthy; see --labels" in result.stderr
