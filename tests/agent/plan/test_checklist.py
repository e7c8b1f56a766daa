"""The nine points of scripts that are run: one healthy, the others wrong in one point each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mp_agent.lint.rules import BY_CODE
from mp_agent.plan.checklist import PointVerdict, go_through

pytestmark = pytest.mark.long

HEALTHY = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1])):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(x).float() - torch.sin(x.sum(1, keepdim=True))).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
"""
FINE, WRONG, NOT_LOOKED_AT = PointVerdict


def checked(tmp_path: Path, source: str, *, run: bool = True, made: int = 30):
    script = tmp_path / "train.py"
    script.write_text(source)
    return go_through(script, (str(made),), run=run, steps=30, seconds=300)


def edited(*edits: tuple[str, str]) -> str:
    source = HEALTHY
    for before, after in edits:
        assert before in source
        source = source.replace(before, after)
    return source


@pytest.mark.slow
def test_a_healthy_script_is_fine_in_all_nine_points_by_what_was_measured(tmp_path):
    made, status = checked(tmp_path, HEALTHY)
    assert [point.number for point in made.points] == list(range(1, 10))
    assert {point.verdict for point in made.points} == {FINE}, made
    assert all(point.evidence and not point.advice for point in made.points)
    assert (status, made.steps, made.notes) == (0, 30, ())
    texts = [" ".join(point.evidence) for point in made.points]
    assert "the weights are fp32" in texts[0] and "clipped to 5 on 0 of 30 steps" in texts[3]
    assert "mean" in texts[5] and "limit" not in texts[5] and "above 10000" in texts[8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edits", "number", "evidence"),
    [
        (
            (("torch.optim", "model.to(getattr(torch, 'b' 'float16'))\noptimizer = torch.optim"),
             ("optimizer = model", "model = model"),
             ("model(x)", "model(x.to(model[0].weight.dtype))")),
            1,
            "run: the weights are bf16, without FP32 copies",
        ),
        ((("dtype=torch.bfloat16", "dtype=torch.float16"),), 5, "MP110"),
        ((("torch.randn(32, 8)", "255 * torch.rand(32, 8)"),), 6, "root mean square 1"),
        (
            (("torch.randn(32, 8)", "torch.randn(32, 8) * torch.tensor([1e-6] + 7 * [1.0])"),),
            9,
            "16 bits lose the small one above 10000",
        ),
    ],
    ids=("no_master_weights", "fp16_without_scaler", "not_normalized", "unequal_dimensions"),
)  # fmt: skip
def test_one_mistake_makes_its_point_wrong_and_no_other(tmp_path, edits, number, evidence):
    made, status = checked(tmp_path, edited(*edits))
    assert made.wrong == (number,), made
    point = made.points[number - 1]
    assert any(evidence in text for text in point.evidence) and point.advice
    assert status == 0 and {one.verdict for one in made.points} == {FINE, WRONG}


@pytest.mark.parametrize(
    ("code", "number"),
    [("MP101", 1), ("MP103", 2), ("MP104", 3), ("MP205", 3), ("MP106", 4), ("MP110", 5),
     ("MP114", 8), ("MP115", 8)],
)  # fmt: skip
def test_a_finding_of_check_is_wrong_also_without_a_run(tmp_path, code, number):
    made, _ = checked(tmp_path, BY_CODE[code].bad, run=False)
    assert number in made.wrong
    point = made.points[number - 1]
    assert any(code in text for text in point.evidence)
    assert BY_CODE[code].remedy in point.advice


def test_without_a_run_nothing_is_fine_that_only_a_run_shows(tmp_path):
    made, _ = checked(tmp_path, HEALTHY, run=False)
    verdicts = [point.verdict for point in made.points]
    assert verdicts == [FINE] * 3 + [NOT_LOOKED_AT] * 6
    assert all(point.advice for point in made.points[3:])
    made, _ = checked(tmp_path, "from trainer import fit\n\nfit()\n", run=False)
    assert {point.verdict for point in made.points} == {NOT_LOOKED_AT}


@pytest.mark.slow
def test_logits_that_are_returned_with_the_loss_are_compared(tmp_path):
    """As of models that are given token numbers, of which nothing else is compared."""
    model = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4))\n"
        "    def forward(self, x):\n"
        "        logits = self.layers(x)\n"
        "        return logits, logits.pow(2).mean()\n"
        "model = Model()"
    )
    made, _ = checked(
        tmp_path,
        edited(
            ("model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))", model),
            ("torch.randn(32, 8)", "torch.randint(9, (32, 8))"),
            ("(model(x).float() - torch.sin(x.sum(1, keepdim=True))).pow(2).mean()", "model(x)[1]"),
        ),
    )
    (evidence,) = made.points[8].evidence
    assert "Model output" in evidence


@pytest.mark.slow
def test_a_run_that_trains_nothing_leaves_what_it_would_show_unseen(tmp_path):
    made, status = checked(tmp_path, "import torch\nprint(torch.ones(1))\n")
    assert {point.verdict for point in made.points} == {NOT_LOOKED_AT}
    assert made.notes == ("no optimizer step was seen in the short run",) and status == 0


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    called = [sys.executable, "-m", "mp_agent", "checklist", *arguments]
    return subprocess.run(called, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_exit_status_distinguishes_a_verdict_a_wrong_use_and_a_crash(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(HEALTHY.replace("    x =", "    assert step < 2, 'broken'\n    x ="))
    crashed = command("--json", str(script), "30")
    assert crashed.returncode == 3 and "AssertionError: broken" in crashed.stderr
    document = json.loads(crashed.stdout)
    assert document["format"] == "mp_agent checklist" and len(document["points"]) == 9
    assert "the script ended with status 1" in document["notes"]
    assert "the points are judged by 2 steps: the script made no more" in document["notes"]
    assert command("--no-run", str(script)).returncode == 0
    script.write_text(BY_CODE["MP106"].bad)
    wrong = command("--no-run", str(script))
    assert wrong.returncode == 1 and "MP106" in wrong.stdout
    assert command(str(tmp_path / "none.py")).returncode == 2
    os.mkfifo(tmp_path / "pipe.py")
    pipe = command("--seconds", "5", str(tmp_path / "pipe.py"))
    assert pipe.returncode == 2 and "pipe.py: not a regular file" in pipe.stderr


@pytest.mark.slow
def test_a_script_that_goes_on_is_ended_after_the_steps_with_its_children(tmp_path):
    endless = HEALTHY.replace(
        "torch.manual_seed(0)",
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))",
    )
    made, status = checked(tmp_path, endless, made=10**9)
    assert status == 0 and made.steps >= 30
    assert not Path("/proc", (tmp_path / "pid").read_text(), "cwd").exists()
