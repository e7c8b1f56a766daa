"""The command as it is typed: plans, table, JSON, page, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mp_agent.cli import main
from mp_agent.plan.precision_plan import PrecisionPlan, plan_of_json

SCRIPT = """
import torch
from torch import nn
from tests.agent.plan.recommendation.models import odd_network as make_model

def weights_alone():
    # The 16-bit copies of the weights are more than what activations save.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, (torch.randn(1, 64), torch.randn(1, 64)), nn.MSELoss()

def many():
    model, (inputs, target), loss = make_model()
    return model, iter([(inputs[:8], target[:8]), (inputs[8:], target[8:])]), loss
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "evaluated.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str):
    options = ("--steps", "3", "--warmup-steps", "1")
    return CliRunner().invoke(main, ["evaluate", *options, *arguments])


def test_a_plan_file_is_measured(script, tmp_path):
    path = tmp_path / "plan.json"
    plan = PrecisionPlan(precision="bf16-autocast", device="cpu", keep_fp32=("3",))
    path.write_text(plan.as_json())
    done = run(f"{script}:make_model", "--plan", str(path))
    assert done.exit_code == 0, done.output
    assert "plan: bf16-autocast; in FP32: 3; epsilon 1e-08; no clipping" in done.output
    assert "peak memory" in done.output and "not measured" in done.output


def test_without_a_plan_one_is_recommended_and_measured(script):
    done = run(f"{script}:many", "--goal", "stability", "--json")
    document = json.loads(done.stdout)
    assert document["format"] == "mp_agent precision evaluation"
    assert document["plan"]["clip_norm"] > 0
    assert len(document["fp32"]["losses"]) == 3


def test_a_target_that_is_required_decides_the_exit_code(script, tmp_path):
    page = tmp_path / "page.html"
    options = ("--precision", "fp32", "--html", str(page))
    done = run(f"{script}:make_model", *options, "--require", "loss")
    assert done.exit_code == 0 and done.stdout == f"{page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert run(f"{script}:make_model", *options, "--require", "memory").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{script}",), "is no script.py:function"),
        (("{script}:make_model", "--plan", "{script}"), ": is no JSON: Expecting value"),
        (
            ("{script}:make_model", "--plan", "{script}", "--precision", "fp32"),
            "--plan and --precision: give one of them",
        ),
        (("{script}:make_model", "--precision", "fp32", "--steps", "1"), "steps: 1 is not"),
    ],
)
def test_what_cannot_be_measured_is_named(script, arguments, message):
    done = run(*(one.format(script=script) for one in arguments))
    assert done.exit_code == 2 and message in done.output


def test_a_plan_that_is_nested_too_deeply_is_named(script, tmp_path):
    (path := tmp_path / "plan.json").write_text("[" * 100_000)
    done = run(f"{script}:make_model", "--plan", str(path))
    assert done.exit_code == 2 and "plan: the JSON is nested too deeply" in done.output


def test_a_plan_that_is_no_file_to_read_is_not_waited_for(script, tmp_path):
    os.mkfifo(path := tmp_path / "plan.json")
    done = run(f"{script}:make_model", "--plan", str(path))
    assert done.exit_code == 2 and "plan.json: cannot be read: " in done.output


def test_a_plan_that_does_not_hold_gives_way_to_the_next_one(script, tmp_path):
    path, found = tmp_path / "plan.json", tmp_path / "evaluation.json"
    options = ("--goal", "memory", "--output", str(path), "--json")
    document = json.loads(run(f"{script}:weights_alone", *options).stdout)
    assert document["plan"]["precision"] == "fp32" and document["rejections"] == {}
    (note,) = (one for one in document["notes"] if "recommended before" in one)
    assert note.startswith("bf16-autocast was recommended before; measured: a peak of ")
    assert plan_of_json(path.read_text()).precision == "fp32"

    rejected = run(f"{script}:weights_alone", "--precision", "bf16-autocast", "--json").stdout
    assert "memory" in json.loads(rejected)["rejections"]
    found.write_text(rejected)
    command = ["recommend", f"{script}:weights_alone", "--steps", "1", "--json", "--goal", "memory"]
    for given, precision in (((), "bf16-autocast"), (("--evaluation", str(found)), "fp32")):
        done = CliRunner().invoke(main, [*command, *given])
        assert json.loads(done.stdout)["plan"]["precision"] == precision
    for content in ("{}", "[" * 100_000):
        found.write_text(content)
        done = CliRunner().invoke(main, [*command, "--evaluation", str(found)])
        assert done.exit_code == 2 and f"{found}: is no evaluation" in done.output


def test_asking_for_help_loads_no_torch():
    code = "import sys; import mp_agent.plan.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
