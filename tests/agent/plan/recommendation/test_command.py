"""The command as it is typed: table, JSON, files, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mp_agent.cli import main
from mp_agent.plan.precision_plan import plan_of_json

SCRIPT = """
from tests.agent.plan.recommendation.models import odd_network as make_model
from torch import nn
import torch

def broken():
    model, (inputs, target), loss = make_model()
    return model, (inputs * float("nan"), target), loss
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "advised.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(main, ["recommend", *arguments, "--steps", "2"])


def test_plan_reasons_dimensions_estimates_and_code_are_printed(script):
    done = run(f"{script}:make_model", "--capability", "8.0")
    assert done.exit_code == 0, done.output
    for text in (
        "Sequential, 4,874 parameters, for speed",
        "bf16-autocast",
        "not detected",
        "50 → 56",
        "estimate by Amdahl's law",
        "def train_step(model, batch, compute_loss, optimizer):",
    ):
        assert text in done.output
    assert "no CUDA GPU was found" not in done.output


def test_json_plan_and_code_are_written(script, tmp_path):
    plan, code = tmp_path / "plan.json", tmp_path / "train.py"
    options = ("--capability", "7.5", "--json", "--output", str(plan), "--code", str(code))
    done = run(f"{script}:make_model", *options)
    document = json.loads(done.stdout)
    assert plan_of_json(plan.read_text()) == plan_of_json(done.stdout)
    assert document["code"] == code.read_text()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{script}", "is no script.py:function"),
        ("{script}:nothing", "has no function nothing"),
        ("{script}:broken", "the loss is nan at step 1 in FP32 already"),
    ],
)
def test_what_cannot_be_advised_is_named(script, target, message):
    done = run(target.format(script=script))
    assert done.exit_code == 2 and message in done.output


def test_asking_for_help_loads_no_torch():
    code = "import sys; import mp_agent.plan.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
