"""The command as it is typed: plans, table, JSON, page, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mp_agent.cli import main
from mp_agent.plan.precision_plan import PrecisionPlan

SCRIPT = """
from tests.agent.plan.recommendation.models import odd_network as make_model

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
        (("{script}:make_model", "--plan", "{script}"), "plan: is no JSON"),
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


def test_asking_for_help_loads_no_torch():
    code = "import sys; import mp_agent.plan.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
