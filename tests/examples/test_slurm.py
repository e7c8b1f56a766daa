"""The files for Slurm and systemd parse with the tools that will read them, and work."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.exporters.discovery import Target, TargetsFile, render_targets
from mp_agent.node.listen import PORTS_TRIED
from mp_agent.ring.address import DEFAULT_PORT
from mp_agent.settings import ENV_PREFIX, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLES = Path(__file__).parents[2] / "examples"
RULES = EXAMPLES.parent / "alerting" / "rendered" / "mp_agent.rules.yaml"


@pytest.mark.e2e
def test_promtool_takes_the_scrape_configuration_with_the_shipped_rules(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    configuration = tmp_path / "prometheus.yml"
    configuration.write_bytes((EXAMPLES / "slurm" / "prometheus.yml").read_bytes())
    for rules in (RULES, EXAMPLES / "slurm" / "gpus.rules.yaml"):
        (tmp_path / rules.name).write_bytes(rules.read_bytes())
    checked = subprocess.run(
        [server("promtool"), "check", "config", configuration], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def scrape_job() -> dict[str, Any]:
    configuration = yaml.safe_load((EXAMPLES / "slurm" / "prometheus.yml").read_text("utf-8"))
    (job,) = (job for job in configuration["scrape_configs"] if job["job_name"] == "mp-agent")
    return dict(job)


def test_prometheus_reads_the_files_that_agents_write_where_the_batch_script_says() -> None:
    (pattern,) = scrape_job()["file_sd_configs"][0]["files"]
    script = (EXAMPLES / "slurm" / "train.sbatch").read_text("utf-8")
    directory = Path(pattern).parent
    assert f"MP_AGENT_SD_DIR=${{MP_AGENT_SD_DIR:-{directory}}}" in script
    assert TargetsFile(directory, "llama-7", "node0-9464").path.match(pattern)


def test_prometheus_keeps_the_ports_that_agents_take_and_no_others() -> None:
    (keep,) = (rule for rule in scrape_job()["relabel_configs"] if rule.get("action") == "keep")
    kept = [port for port in range(1, 65536) if re.fullmatch(keep["regex"], f"node-0:{port}")]
    assert kept == list(range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED))
    assert re.fullmatch(keep["regex"], "[fd00::1]:9464")


RANKS = """
rule_files: [gpus.rules.yaml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - series: mp_agent_rank_info{run="llama-7041", rank="3", gpu_uuid="604ac76c-d9cf"}
        values: 1x4
      - series: mp_agent_rank_info{run="llama-7041", rank="4", gpu_uuid="GPU-77777777-d9cf"}
        values: 1x4
      - series: mp_agent_rank_info{run="llama-7000", rank="0", gpu_uuid="604ac76c-d9cf"}
        values: 1x4
      - series: mp_agent_rank_info{run="cpu", rank="0", gpu_uuid=""}
        values: 1x4
      - series: mp_agent_rank_up{run="llama-7041", rank="3"}
        values: 1x4
      - series: mp_agent_rank_up{run="llama-7041", rank="4"}
        values: 1x4
      - series: mp_agent_rank_up{run="llama-7000", rank="0"}
        values: 0x4
      - series: mp_agent_rank_up{run="cpu", rank="0"}
        values: 1x4
      - series: mp_agent_run_active{run="llama-7041"}
        values: 1x4
      - series: mp_agent_run_active{run="cpu"}
        values: 1x4
      - series: DCGM_FI_DEV_GPU_TEMP{UUID="GPU-604ac76c-d9cf", gpu="0", hpc_job="7041"}
        values: 60x4
    promql_expr_test:
      - expr: DCGM_FI_DEV_GPU_TEMP * on (UUID) group_left (run, rank) mp_agent:gpu:rank
        eval_time: 30s
        exp_samples:
          - labels: >-
              {UUID="GPU-604ac76c-d9cf", gpu="0", hpc_job="7041", run="llama-7041", rank="3"}
            value: 60
      - expr: DCGM_FI_DEV_GPU_TEMP * on (hpc_job) group_left (run) mp_agent:hpc_job:run
        eval_time: 30s
        exp_samples:
          - labels: '{UUID="GPU-604ac76c-d9cf", gpu="0", hpc_job="7041", run="llama-7041"}'
            value: 60
"""


@pytest.mark.e2e
def test_gpus_are_joined_to_the_living_ranks_and_runs_that_use_them(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(EXAMPLES / "slurm" / "gpus.rules.yaml", tmp_path)
    (tmp_path / "test.yaml").write_text(RANKS)
    checked = subprocess.run(
        [server("promtool"), "test", "rules", tmp_path / "test.yaml"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_targets_of_dead_jobs_are_cleaned_up_and_others_stay(tmp_path: Path) -> None:
    target = Target(url="http://node0:9464", run="x", attempt=0, node_rank=0, host="node0")
    for run in ("dead", "alive"):
        TargetsFile(tmp_path, run, "node0-9464").write(render_targets([target]))
    dead = TargetsFile(tmp_path, "dead", "node0-9464").path
    partial, foreign = tmp_path / ".x.partial", tmp_path / "somebody-else.json"
    partial.touch()
    foreign.touch()
    long_ago = time.time() - 3600
    for path in (dead, partial, foreign):
        os.utime(path, (long_ago, long_ago))
    script = EXAMPLES / "slurm" / "clean-targets.sh"
    subprocess.run([script, tmp_path], check=True)
    alive = TargetsFile(tmp_path, "alive", "node0-9464").path
    assert sorted(tmp_path.iterdir()) == sorted([alive, foreign])


def test_the_batch_script_is_sound_shell_and_sets_settings_that_exist() -> None:
    script = EXAMPLES / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    named = [
        line.removeprefix("export ").partition("=")[0]
        for line in script.read_text("utf-8").splitlines()
        if line.startswith(f"export {ENV_PREFIX}")
    ]
    assert named
    assert "SRUN_CPUS_PER_TASK" in script.read_text("utf-8")
    for variable in named:
        assert variable.removeprefix(ENV_PREFIX).lower() in Settings.model_fields


def test_the_batch_script_keeps_the_token_off_the_command_line() -> None:
    text = (EXAMPLES / "slurm" / "train.sbatch").read_text("utf-8")
    command = text.partition("\nsrun ")[2]
    assert command
    assert "TOKEN" not in command


def unit_text() -> str:
    return (EXAMPLES / "systemd" / "mp-agent.service").read_text("utf-8")


def test_the_unit_runs_the_node_agent_and_outlasts_the_linger() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(unit_text())
    service = unit["Service"]
    assert service["ExecStart"].split()[1:] == ["node"]
    linger_seconds = Settings.model_fields["linger_seconds"].default
    assert int(service["TimeoutStopSec"]) > linger_seconds
    assert service["CapabilityBoundingSet"] == ""
    assert service["NoNewPrivileges"] == "yes"


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not on PATH")
    text = unit_text().replace("/opt/mp-agent/bin/mp-agent", "/bin/true")
    (tmp_path / "mp-agent.service").write_text(re.sub("(User|Group)=trainer", r"\1=root", text))
    checked = subprocess.run(
        [verify, "verify", tmp_path / "mp-agent.service"], capture_output=True, text=True
    )
    assert "mp-agent.service" not in checked.stderr, checked.stderr


def test_the_image_is_built_from_all_that_the_package_holds() -> None:
    root = EXAMPLES.parent
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = (root / "Dockerfile").read_text("utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert set(wheel["only-include"]) <= copied
    assert "USER 1000:1000" in lines
