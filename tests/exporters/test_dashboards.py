"""`mp-agent dashboards` writes what is committed, with the limits and runbooks of a site."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mp_agent.exporters.dashboards import dashboards_command

COMMITTED = Path(__file__).parents[2] / "grafana" / "dashboards"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(dashboards_command, list(arguments))


def norm_panel(output: Path) -> Any:
    board = json.loads((output / "mp-agent-run.json").read_text("utf-8"))
    (panel,) = (panel for panel in board["panels"] if panel["id"] == 30)
    return panel


def limits(panel: Any) -> list[float]:
    return [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]]


def test_the_written_files_are_the_committed_ones(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    result = run("--output", str(output))
    assert result.exit_code == 0, result.output
    written = {path.name: path.read_bytes() for path in output.iterdir()}
    assert written == {path.name: path.read_bytes() for path in COMMITTED.glob("*.json")}
    assert len(written) == 7


def test_without_a_directory_they_are_listed() -> None:
    assert "mp-agent-run.json: mp_agent / Run" in run().output


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    result = run("--output", str(taken / "x"))
    assert result.exit_code == 2
    assert str(taken) in result.output


def test_a_threshold_that_was_set_is_drawn_and_named(tmp_path: Path) -> None:
    run("--output", str(tmp_path), "--set", "grad_norm_high=50", "--set", "grad_norm_very_low=2e-3")
    panel = norm_panel(tmp_path)
    assert limits(panel) == [1e-6, 0.002, 0.01, 50, 1000]
    assert "(50, 1000)" in panel["description"]
    ends = [target["expr"].rpartition(" + ")[2] for target in panel["targets"][-2:]]
    assert ends == ["0.002", "1000"]


def test_the_setting_applies_before_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MP_AGENT_THRESHOLDS", '{"grad_norm_high": 60, "grad_norm_extreme": 600}')
    run("--output", str(tmp_path), "--set", "grad_norm_high=50")
    assert limits(norm_panel(tmp_path))[-2:] == [50, 600]


@pytest.mark.parametrize(
    ("base", "page"),
    [
        ("https://wiki/runbooks/", "https://wiki/runbooks/mpagentgradientexplosion.md"),
        ("https://wiki/p?name={alert}", "https://wiki/p?name=mpagentgradientexplosion"),
    ],
)
def test_panels_link_to_the_runbooks_of_the_site(tmp_path: Path, base: str, page: str) -> None:
    run("--output", str(tmp_path), "--runbook-base", base)
    assert norm_panel(tmp_path)["links"][0]["url"] == page
    assert all("mp-agent.example" not in path.read_text("utf-8") for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--set", "grad_norm_higher=50"), "'grad_norm_higher' is unknown"),
        (("--set", "grad_norm_high"), "write NAME=VALUE"),
        (("--set", "grad_norm_high=much"), "grad_norm_high has value 'much'"),
        (("--set", "grad_norm_high=2000"), "it must be below grad_norm_extreme"),
        (("--runbook-base", "wiki"), "'wiki'; it must be an http(s) address"),
    ],
)
def test_what_cannot_be_had_is_named_and_nothing_written(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    result = run("--output", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert not (tmp_path / "out").exists()
