from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from mp_agent.alerting.alertmanager import MESSAGES
from mp_agent.alerting.alertmanager.command import alertmanager_command
from mp_agent.alerting.rules import rendered_files


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(alertmanager_command, arguments)


@pytest.mark.slow
def test_both_files_are_written_and_are_the_committed_ones(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "directory"
    assert _run("--output", str(directory)).exit_code == 0
    assert sorted(path.name for path in directory.iterdir()) == [
        "alertmanager.yaml",
        "mp_agent.tmpl",
    ]
    committed = rendered_files()["alerting/rendered/alertmanager.yaml"]
    written = (directory / "alertmanager.yaml").read_text()
    assert written.splitlines()[1:] == committed.splitlines()[1:]
    assert (directory / "mp_agent.tmpl").read_text() == MESSAGES


def test_options_reach_the_file_and_its_heading(tmp_path: Path) -> None:
    options = ("--receiver", "slack", "--slack-channel", "#llm", "--time-scale", "0.5")
    assert _run("--output", str(tmp_path), *options).exit_code == 0
    text = (tmp_path / "alertmanager.yaml").read_text()
    document = yaml.safe_load(text)
    assert document["receivers"][1]["slack_configs"][0]["channel"] == "#llm"
    assert set(document["receivers"][1]) == {"name", "slack_configs"}
    assert document["route"]["routes"][0]["group_wait"] == "15s"
    assert "--receiver slack --slack-channel '#llm' --time-scale 0.5" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--receiver", "pigeon"), "'pigeon' is not one of"),
        (("--smarthost", "mail"), "smarthost has value 'mail'"),
        (("--webhook-url", "here"), "webhook_url has value 'here'"),
        (("--time-scale", "-1"), "time scale has value -1.0"),
        (
            ("--receiver", "slack", "--webhook-url", "https://hooks.example/x"),
            "--webhook-url is for webhook, which is not a --receiver",
        ),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_written(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = _run("--output", str(tmp_path / "d"), *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "d").exists()
