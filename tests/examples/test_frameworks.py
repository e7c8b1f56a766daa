"""The examples for frameworks on two ranks: what is merged is what the framework logs."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mp_agent.records.merged import MergedStep
from mp_agent.ring import locations
from tests.agent.probe.rings import RingContents, merge_rings, read_ring

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
WORLD = 2
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    f"--nproc-per-node={WORLD}",
)

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]


def trained(
    command: Sequence[str], directory: Path, **variables: str
) -> tuple[dict[int, RingContents], str]:
    """Run an example; return its rings by rank, and its standard output."""
    done = subprocess.run(
        command,
        check=False,
        timeout=900,
        text=True,
        capture_output=True,
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / ".editable"),
            "MP_AGENT_DIR": str(directory / "shm"),
            "MP_AGENT_NODE_AGENT": "none",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_CPU": "1",
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr[-10_000:]
    (run_dir,) = locations.find_runs(directory / "shm")
    paths = sorted(locations.find_rings(run_dir))
    assert len(paths) == WORLD
    return {rank: read_ring(path, one_schema=False) for rank, path in enumerate(paths)}, done.stdout


def agrees(merged: Sequence[MergedStep], logged: Sequence[dict[str, Any]], digits: float) -> None:
    assert len(logged) == 4
    assert [step.step for step in merged] == [int(entry["step"]) for entry in logged]
    for name in ("loss", "grad_norm"):
        found = [step.grad_norm if name == "grad_norm" else step.get(name) for step in merged]
        wanted = [float(entry[name]) for entry in logged]
        assert found == pytest.approx(wanted, rel=digits, abs=digits), name


def history(directory: Path) -> list[dict[str, Any]]:
    state = json.loads((directory / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def printed(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_a_loop_of_ones_own_needs_no_line(tmp_path: Path) -> None:
    command = (*TORCHRUN, str(EXAMPLES / "train_with_ddp.py"))
    rings, output = trained(command, tmp_path, MP_AGENT_ATTACH="1")
    agrees(merge_rings(rings), printed(output), 1e-6)


def test_accelerate_under_its_own_launcher(framework, tmp_path: Path) -> None:
    framework("accelerate")
    launch = str(Path(sys.executable).with_name("accelerate"))
    options = ("--num_processes", "2", "--multi_gpu", "--main_process_port", "0")
    command = (launch, "launch", *options, str(EXAMPLES / "train_with_accelerate.py"))
    rings, output = trained(command, tmp_path)
    agrees(merge_rings(rings), printed(output), 1e-5)


def test_lightning_under_its_own_launcher(framework, tmp_path: Path) -> None:
    framework("lightning")
    command = (sys.executable, str(EXAMPLES / "train_with_lightning.py"), str(tmp_path))
    rings, _ = trained(command, tmp_path)
    with (tmp_path / "logs" / "version_0" / "metrics.csv").open() as file:
        rows = [{**row, "step": int(row["step"]) + 1} for row in csv.DictReader(file)]
    agrees(merge_rings(rings), rows, 1e-5)


def test_transformers_reports_to_mp_agent(framework, tmp_path: Path) -> None:
    framework("transformers")
    command = (*TORCHRUN, str(EXAMPLES / "train_with_transformers.py"), str(tmp_path))
    rings, _ = trained(command, tmp_path)
    agrees(merge_rings(rings), history(tmp_path), 1e-4)


def test_layers_of_trl_with_peft_have_the_names_of_the_model(framework, tmp_path: Path) -> None:
    for name in ("trl", "peft", "tokenizers", "datasets"):
        framework(name)
    command = (*TORCHRUN, str(EXAMPLES / "train_with_trl_and_peft.py"), str(tmp_path))
    rings, _ = trained(command, tmp_path, MP_AGENT_ATTACH="1")
    agrees(merge_rings(rings), history(tmp_path), 1e-4)
    schema = rings[0].schema
    assert [layer.name for layer in schema.layers[: schema.parameter_layers]] == [
        "transformer.h.0.attn.c_attn.lora_A.default.weight",
        "transformer.h.0.attn.c_attn.lora_B.default.weight",
    ]
