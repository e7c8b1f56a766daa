"""`mp-agent backtest`, as its user calls it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mp_agent.cli import main
from tests.agent.backtest.builders import broken_points, healthy_points, rows_of


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["backtest", "--processes", "1", *map(str, arguments)])


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return write(tmp_path / "healthy.jsonl", healthy_points(200))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return write(tmp_path / "broken.jsonl", broken_points(200, 151))


def write(path: Path, points) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(points)))
    return path


def test_it_prints_a_line_per_alert_and_what_was_blind(broken: Path) -> None:
    result = run(broken)
    assert result.exit_code == 0
    (line,) = (line for line in result.output.splitlines() if "MpAgentLossNonFinite" in line)
    assert line.split() == [
        *("broken", "MpAgentLossNonFinite", "critical", "151", "151", "49", "s", "+", "1"),
        *("1", "at", "151"),
    ]
    assert "blind: the log does not hold the gradients of layers" in result.output
    assert "note: no times in the log: 1 s per step assumed (--step-seconds)" in result.output


def test_a_healthy_run_is_said_to_be_quiet(healthy: Path) -> None:
    lines = run(healthy).output.splitlines()
    assert lines[-2:] == ["not found: the loss scale", "1 run: 1 without an alert"]


def test_a_log_without_a_norm_is_not_said_to_be_quiet(healthy: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    part.write_text(healthy.read_text().replace("grad_norm", "another"))
    lines = run(part).output.splitlines()
    assert lines[-2] == "not found: the gradient norm, the loss scale"
    assert lines[-1] == (
        "1 run: 0 without an alert, 1 judged only in part, without the gradient norm"
    )
    assert run(healthy, part).output.splitlines()[-2] == (
        "not found: the gradient norm in 1 of 2, the loss scale in 2 of 2"
    )


def test_the_value_of_an_explosion_is_the_highest_norm(tmp_path: Path) -> None:
    points = healthy_points(200)
    points[149:160] = [replace(p, grad_norm=1e3 * p.step) for p in points[149:160]]
    result = run(write(tmp_path / "exploded.jsonl", points))
    (line,) = (line for line in result.output.splitlines() if "MpAgentGradientExplosion" in line)
    assert line.split()[-3:] == ["160000", "at", "160"]


def test_several_runs_are_summed_up(healthy: Path, broken: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.yaml"
    labels.write_text("healthy: healthy\nbroken.jsonl: wrong\n")
    result = run(healthy, broken, "--labels", labels)
    assert result.output.splitlines()[-3:] == [
        "2 runs: 1 without an alert, by the worst alert 1 critical",
        "1 healthy run: 1 without an alert",
        "1 wrong run: 0 without an alert, by the worst alert 1 critical",
    ]


def test_json_holds_all_of_it(healthy: Path, broken: Path) -> None:
    document = json.loads(run(healthy, broken, "--json").output)
    assert (document["format"], document["version"]) == ("mp_agent backtest", 1)
    quiet, loud = document["runs"]
    assert (quiet["name"], quiet["worst"], quiet["alerts"]) == ("healthy", "", [])
    alert = next(a for a in loud["alerts"] if a["name"] == "MpAgentLossNonFinite")
    assert (alert["severity"], alert["first_step"], alert["value"]) == ("critical", 151, 1.0)
    assert alert["spans"] == [[151, 200]]
    assert {"name", "reason"} == loud["blind"][0].keys()


@pytest.mark.slow
def test_compare_shows_what_another_setting_changes(broken: Path) -> None:
    result = run(broken, "--compare", "MpAgentLossNonFinite=off")
    (line,) = (line for line in result.output.splitlines() if "MpAgentLossNonFinite" in line)
    assert "critical at 151" in line and line.rstrip().endswith("none")
    assert result.output.splitlines()[-1] == "1 runs: 0 alerts come, 1 go, 0 change"
    found = json.loads(run(broken, "--compare", "MpAgentLossNonFinite=off", "--json").output)
    (difference,) = found["differences"]
    assert difference["after"] is None and found["compare"] == ["MpAgentLossNonFinite=off"]


def test_other_logs_are_judged_when_one_cannot_be_read(broken: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("step,loss\n1,abc\n")
    result = run(tmp_path / "bad.csv", tmp_path / "gone.csv", broken)
    assert result.exit_code == 1
    assert "bad.csv: line 2: loss has value 'abc', which is no number" in result.stderr
    assert "gone.csv: no such file or directory" in result.stderr
    assert "MpAgentLossNonFinite" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--set", "grad_norm_hgih=3"), "'grad_norm_hgih' is unknown"),
        (("--set", "grad_norm_high=-3"), "grad_norm_high has value -3.0; it must be above 0"),
        (("--column", "los=x"), "--column has quantity 'los'; known: step, loss"),
        (("--column", "loss"), "--column has value 'loss'; write QUANTITY=NAME"),
        (("--start", "yesterday"), "--start has value 'yesterday'; give 2026-01-31T10:00"),
        (("--scrape-interval", "0"), "--scrape-interval has value '0'; it must be above 0"),
        (("--step-seconds", "0"), "0.0 is not in the range"),
    ],
)
def test_wrong_use_is_named_before_anything_is_judged(healthy: Path, arguments, problem) -> None:
    result = run(healthy, *arguments)
    assert result.exit_code == 2
    assert problem in result.output


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: fine\n", "run 'a' has label 'fine'; it must be one of healthy, wrong, unclear"),
        ("- a\n", "must hold a mapping"),
        ("{", "is no YAML"),
        ("", "must hold a mapping"),
    ],
)
def test_labels_that_cannot_be_used_are_named(healthy: Path, tmp_path, text, problem) -> None:
    labels = tmp_path / "labels.yaml"
    labels.write_text(text)
    result = run(healthy, "--labels", labels)
    assert result.exit_code == 2
    assert f"mp-agent backtest: {labels}: " in result.stderr and problem in result.stderr


def test_labels_may_be_csv(healthy: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("run,label\nhealthy,healthy\n")
    assert "1 healthy run" in run(healthy, "--labels", labels).output
    labels.write_text("healthy\n")
    assert "line 1 holds 1 values; write run,label" in run(healthy, "--labels", labels).stderr


def test_an_alert_can_fail_a_pipeline(healthy: Path, broken: Path) -> None:
    assert run(broken, "--fail-on", "critical").exit_code == 3
    assert run(healthy, "--fail-on", "info").exit_code == 0


def test_nothing_to_judge_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "is a log of no known format" in result.stderr


def test_tables_without_losses_below_a_directory_are_passed_over(broken: Path) -> None:
    (broken.parent / "eval.csv").write_text("step,eval_loss\n1,2\n")
    result = run(broken.parent)
    assert result.exit_code == 0
    assert "eval.csv" not in result.output


@pytest.mark.long
@pytest.mark.slow
def test_logs_are_judged_by_several_processes_as_by_one(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / f"run-{number}.jsonl", broken_points(4000, 3900 + number))
    one = json.loads(run(tmp_path, "--json").output)
    several = CliRunner().invoke(
        main, ["backtest", "--processes", "2", "--json", str(tmp_path)], catch_exceptions=False
    )
    assert json.loads(several.output) == one
