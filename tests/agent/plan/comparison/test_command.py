"""The command as it is typed: targets, options, output, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mp_agent.cli import main
from tests.subtests import each

SCRIPT = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    return model, (torch.randn(8, 4), torch.randint(0, 2, (8,))), nn.CrossEntropyLoss()

def only_a_model():
    return nn.Linear(1, 1)

def broken():
    raise OSError("no data")

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, inputs):
        return inputs @ self.weight

class Deep(nn.Module):
    def forward(self, inputs):
        nested = inputs
        for _ in range(3000):
            nested = [nested]
        return nested

class Holds(nn.Linear):
    def __init__(self, called):
        super().__init__(4, 2)
        self.called = called

    def forward(self, inputs):
        self.called(inputs)
        return super().forward(inputs)

def exits_in_forward():
    return Holds(exit), (torch.zeros(8, 4), torch.zeros(8, 2)), nn.MSELoss()

def of_arguments(size):
    return make_model()

def prints():
    print("the model is made")
    called = lambda inputs: print("the model is called")
    return Holds(called), (torch.randn(8, 4), torch.zeros(8, 2)), nn.MSELoss()

def nested():
    return Holds(Deep()), (torch.zeros(8, 4), torch.zeros(8, 2)), nn.MSELoss()

def of_torch_alone():
    return nn.Linear(4, 2), (torch.zeros(8, 5), torch.zeros(8, 2)), nn.MSELoss()

def with_a_loss_of_outputs():
    return nn.Linear(4, 2), torch.zeros(8, 4), lambda outputs: outputs.sum()

def breaks_in_forward():
    return Broken(), (torch.randn(8, 4), torch.randint(0, 2, (8,))), nn.CrossEntropyLoss()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "training.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(main, ["compare", *arguments])


def test_a_table_is_printed(script):
    done = run(f"{script}:make_model", "--dtype", "bf16", "--dtype", "tf32", "--tolerance", "0.1")
    assert done.exit_code == 0, done.output
    assert "Sequential, 58 parameters, against fp32" in done.output
    assert "passes: mean absolute difference" in done.output


def test_json_and_a_page_are_written(script, tmp_path):
    done = run(f"{script}:make_model", "--dtype", "tf32", "--json")
    document = json.loads(done.stdout)
    assert document["format"] == "mp_agent precision comparison"
    assert document["passed"] == ["tf32"] and len(document["candidates"][0]["calls"]) == 5
    page = tmp_path / "page.html"
    done = run(f"{script}:make_model", "--dtype", "tf32", "--html", str(page))
    assert done.stdout == f"{page}\n" and page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("command", ["compare", "compare --gradients", "recommend"])
def test_what_the_model_prints_is_no_part_of_the_result(script, command):
    done = CliRunner().invoke(main, [*command.split(), f"{script}:prints", "--json"])
    assert isinstance(json.loads(done.stdout), dict)
    assert "the model is made" in done.stderr and "the model is called" in done.stderr


def test_a_precision_that_is_required_decides_the_exit_code(script):
    options = ["--dtype", "tf32", "--search-trials", "0"]
    assert run(f"{script}:make_model", *options, "--require", "tf32").exit_code == 0
    failing = [*options, "--require", "fp8-e5m2", "--tolerance", "1e-9"]
    assert run(f"{script}:make_model", *failing).exit_code == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{script}:nothing", "has no function nothing"),
        ("{script}:of_arguments", "called without arguments: missing a required argument: 'size'"),
        ("{script}x.py:make", "x.py: cannot be read as Python: invalid syntax"),
        ("{script}:only_a_model", "returned Linear; it has to return (model, batch)"),
        ("/nothing.py:make", "/nothing.py: no such file"),
        ("no_such_module:make", "no_such_module: no such module"),
        ("{script}", "is no script.py:function"),
        ("{script}:with_a_loss_of_outputs", "loss: is called with the model and a batch: too many"),
        ("{script}:nested", "what the model takes or returns is nested too deeply"),
    ],
)
def test_what_cannot_be_compared_is_named(script, target, message):
    Path(f"{script}x.py").write_text("def make(:")
    done = run(target.format(script=script))
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize("command", ["compare", "recommend", "evaluate"])
@pytest.mark.parametrize(
    ("target", "line", "error"),
    [
        ("broken", 'raise OSError("no data")', "OSError: no data"),
        ("breaks_in_forward", "return inputs @ self.weight", "RuntimeError"),
        ("exits_in_forward", "self.called(inputs)", "SystemExit"),
    ],
)
def test_code_of_the_user_that_raises_is_told_apart_and_shown_alone(
    script, command, target, line, error
):
    done = CliRunner().invoke(main, [command, f"{script}:{target}"])
    assert done.exit_code == 3, done.output
    assert line in done.stderr and error in done.stderr
    files = [line.split('"')[1] for line in done.stderr.splitlines() if line.startswith("  File")]
    assert files and set(files) == {script}


@each("command", ["compare", "recommend", "evaluate"])
def test_a_model_that_is_torchs_alone_is_told_apart_too(script, command):
    done = CliRunner().invoke(main, [command, f"{script}:of_torch_alone"])
    assert done.exit_code == 3, done.output
    assert "the code under test raised an exception" in done.stderr
    assert "shapes cannot be multiplied" in done.stderr and "mp_agent/" not in done.stderr


@pytest.mark.slow
def test_comparing_runs_and_asking_for_help_load_no_torch():
    code = (
        "import sys; import mp_agent.plan.commands, mp_agent.cli, mp_agent; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
