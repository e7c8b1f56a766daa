"""`mp-agent doctor` prints the list, its JSON, and says by its exit code how it went."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mp_agent.cli import main
from mp_agent.doctor import command
from mp_agent.doctor.command import MACHINE_CHECKS, PROMETHEUS_CHECKS, Check, examine
from mp_agent.doctor.machine import CheckStatus, Machine, ok
from mp_agent.settings import Settings


def doctor(settings: Settings, *arguments: str, **variables: str) -> Result:
    environment = {
        "MP_AGENT_DIR": str(settings.dir),
        "MP_AGENT_LOG_DIR": str(settings.log_dir),
        "MP_AGENT_PORT": "0",
        **variables,
    }
    return CliRunner(env=environment).invoke(main, ["doctor", *arguments])


@pytest.fixture
def on_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("none / tmpfs rw 0 0\n")
    monkeypatch.setattr("mp_agent.doctor.runs._MOUNTS", mounts)


@pytest.mark.usefixtures("on_tmpfs")
def test_a_machine_where_all_is_well_gives_0(watched: Settings) -> None:
    result = doctor(watched)
    assert result.exit_code == 0, result.output
    assert "nothing wrong" in result.output


def test_something_wrong_gives_1_with_what_to_do(settings: Settings) -> None:
    result = doctor(settings)
    assert result.exit_code == 1
    assert "mp_agent.init()" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--scrape", "node7:9464"),
        ("--scrape", "http://"),
        ("--prometheus", "ftp://prometheus"),
        ("--prometheus", "http://[::1"),
        ("--scrape", "http://node7:99999"),
        ("--unknown",),
        ("surplus",),
    ],
)
def test_a_wrong_call_gives_2_and_is_named(arguments: tuple[str, ...], settings: Settings) -> None:
    result = doctor(settings, *arguments)
    assert result.exit_code == 2
    assert arguments[-1] in result.output


def test_json_holds_every_check_with_its_findings(settings: Settings) -> None:
    result = doctor(settings, "--json")
    report = json.loads(result.output)
    assert [check["name"] for check in report["checks"]] == [one.name for one in MACHINE_CHECKS]
    findings = [finding for check in report["checks"] for finding in check["findings"]]
    assert {finding["verdict"] for finding in findings} <= {one.value for one in CheckStatus}
    assert report["wrong"] == sum(finding["verdict"] == "wrong" for finding in findings)
    assert all(check["findings"] for check in report["checks"])


def test_no_secret_is_printed_in_either_form(settings: Settings) -> None:
    secrets = {
        "MP_AGENT_TOKEN": "tell-nobody",
        "MP_AGENT_BASIC_AUTH_USER": "scraper",
        "MP_AGENT_BASIC_AUTH_PASSWORD": "tell-nobody-either",
    }
    for arguments in ((), ("--json",)):
        assert "tell-nobody" not in doctor(settings, *arguments, **secrets).output


def test_the_address_may_be_given_with_its_path(settings: Settings) -> None:
    result = doctor(settings, "--scrape", "http://127.0.0.1:1/metrics")
    assert "http://127.0.0.1:1/healthz" in result.output


def test_a_check_that_fails_stops_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(machine: Machine) -> list[object]:
        raise RuntimeError("broken")

    broken = Check("broken", "?", fails)  # type: ignore[arg-type]
    fine = Check("fine", "?", lambda machine: [ok("fine")])
    monkeypatch.setattr(command, "MACHINE_CHECKS", (broken, fine))
    (_, first), (_, second) = examine(Machine(settings))
    assert first[0].verdict is CheckStatus.UNKNOWN
    assert "RuntimeError: broken" in first[0].text
    assert second[0].verdict is CheckStatus.OK


def test_names_of_checks_are_unique() -> None:
    names = [check.name for check in (*MACHINE_CHECKS, *PROMETHEUS_CHECKS)]
    assert len(names) == len(set(names))
