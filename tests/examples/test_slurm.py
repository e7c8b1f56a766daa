"""The files for Slurm and systemd parse with the tools that will read them, and work."""

import base64
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.inputs.addresses import DEFAULT_PORT
from mp_agent.node.endpoint import PORTS_TRIED
from mp_agent.node.export.service_discovery import Target, TargetsFile, render_targets
from mp_agent.settings import ENV_PREFIX, Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
RULES = EXAMPLES.parent / "alerting" / "rendered" / "mp_agent.rules.yaml"


@pytest.mark.e2e
def test_promtool_takes_the_scrape_configuration_with_the_shipped_rules(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    shipped = EXAMPLES / "slurm" / "prometheus.yml"
    configuration = tmp_path / "prometheus.yml"
    configuration.write_bytes(shipped.read_bytes())
    for rules in (RULES, EXAMPLES / "slurm" / "gpus.rules.yaml"):
        (tmp_path / rules.name).write_bytes(rules.read_bytes())
    for file, rule_files in ((shipped, 1), (configuration, 2)):
        checked = subprocess.run(
            [server("promtool"), "check", "config", file], capture_output=True, text=True
        )
        output = checked.stdout + checked.stderr
        assert checked.returncode == 0, output
        assert f"SUCCESS: {rule_files} rule files found" in output


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
      - series: mp_agent_run_active{run="notebook"}
        values: 1x4
      - series: DCGM_FI_DEV_GPU_TEMP{UUID="GPU-604ac76c-d9cf", gpu="0", hpc_job="7041"}
        values: 60x4
      - series: DCGM_FI_DEV_GPU_TEMP{UUID="GPU-idle", gpu="1"}
        values: 30x4
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


NODES = 5000
_STUBS = {
    "scontrol": f"#!/bin/sh\nseq --format=gpu-node-%g {NODES}\n",
    "srun": "#!/bin/sh\necho $#\nprintf '%s\\n' \"$@\"\nenv\n",
}
"""What Slurm would do: name the nodes of a large job, start the step."""


@pytest.fixture
def step(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Run the batch script; return what the step is called with and in which environment."""
    for name, text in _STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ran = subprocess.run(
        ["bash", EXAMPLES / "slurm" / "train.sbatch"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7041",
            "SLURM_JOB_NAME": "llama",
            "SLURM_JOB_NODELIST": f"gpu-node-[1-{NODES}]",
            "SLURM_NNODES": str(NODES),
            "SLURM_CPUS_PER_TASK": "64",
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    count, *lines = ran.stdout.splitlines()
    arguments, variables = lines[: int(count)], lines[int(count) :]
    return arguments, dict(line.split("=", 1) for line in variables)


def test_the_step_meets_at_the_first_node_and_keeps_every_core(
    step: tuple[list[str], dict[str, str]],
) -> None:
    arguments, variables = step
    assert arguments[arguments.index("mp-agent") :][:4] == ["mp-agent", "exec", "--", "torchrun"]
    assert "--rdzv-endpoint=gpu-node-1:29500" in arguments
    assert f"--nnodes={NODES}" in arguments
    assert variables["SRUN_CPUS_PER_TASK"] == "64"


def test_the_step_has_settings_that_exist_and_a_token_on_no_command_line(
    step: tuple[list[str], dict[str, str]],
) -> None:
    arguments, variables = step
    given = {name: value for name, value in variables.items() if name.startswith(ENV_PREFIX)}
    assert {name.removeprefix(ENV_PREFIX).lower() for name in given} <= Settings.model_fields.keys()
    assert given["MP_AGENT_RUN"] == "llama-7041"
    assert len(base64.b64decode(given["MP_AGENT_TOKEN"])) == 32
    assert not any(given["MP_AGENT_TOKEN"] in argument for argument in arguments)


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
