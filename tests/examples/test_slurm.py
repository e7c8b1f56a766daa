"""The files for Slurm and systemd parse with the tools that will read them."""

import subprocess
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from mp_agent.settings import ENV_PREFIX, Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
RULES = EXAMPLES.parent / "alerting" / "rendered" / "mp_agent.rules.yaml"


@pytest.mark.e2e
def test_promtool_takes_the_scrape_configuration_with_the_shipped_rules(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    configuration = tmp_path / "prometheus.yml"
    configuration.write_bytes((EXAMPLES / "slurm" / "prometheus.yml").read_bytes())
    (tmp_path / RULES.name).write_bytes(RULES.read_bytes())
    checked = subprocess.run(
        [server("promtool"), "check", "config", configuration], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_reads_the_directory_that_the_batch_script_names() -> None:
    configuration = yaml.safe_load((EXAMPLES / "slurm" / "prometheus.yml").read_text("utf-8"))
    (job,) = (job for job in configuration["scrape_configs"] if job["job_name"] == "mp-agent")
    assert job["file_sd_configs"][0]["files"] == ["/shared/mp_agent/targets/*.json"]


def test_the_batch_script_is_sound_shell_and_sets_settings_that_exist() -> None:
    script = EXAMPLES / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    named = [
        line.removeprefix("export ").partition("=")[0]
        for line in script.read_text("utf-8").splitlines()
        if line.startswith(f"export {ENV_PREFIX}")
    ]
    assert named
    for variable in named:
        assert variable.removeprefix(ENV_PREFIX).lower() in Settings.model_fields


def test_the_batch_script_keeps_the_token_off_the_command_line() -> None:
    text = (EXAMPLES / "slurm" / "train.sbatch").read_text("utf-8")
    command = text.partition("\nsrun ")[2]
    assert command
    assert "TOKEN" not in command


def test_the_unit_runs_the_node_agent_and_outlasts_the_linger() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(EXAMPLES / "systemd" / "mp-agent.service")
    service = unit["Service"]
    assert service["ExecStart"].split()[1:] == ["node"]
    linger_seconds = Settings.model_fields["linger_seconds"].default
    assert int(service["TimeoutStopSec"]) > linger_seconds
