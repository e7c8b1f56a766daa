"""What is reported depends on what the code means, not on how it is written."""

from pathlib import Path

from mp_agent.lint.interpret.interpreter import trace_module
from mp_agent.lint.interpret.modules import Project
from mp_agent.lint.runner import check_paths

STEP = """\
import torch


def train(model, loader, optimizer, scaler):
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
{clip}        scaler.step(optimizer)
        scaler.update()
"""
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"


def counts(path: Path, **files: str) -> dict[str, int]:
    for name, text in files.items():
        file = path / f"{name.replace('__', '/').replace('INIT', '__init__')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return check_paths(path).counts()


def test_removing_unscale_from_a_right_loop_is_found(tmp_path: Path) -> None:
    right = STEP.format(clip="        scaler.unscale_(optimizer)\n" + CLIP)
    assert counts(tmp_path, main=right) == {}
    assert counts(tmp_path, main=STEP.format(clip=CLIP)) == {"MP106": 1}


def test_relative_imports_of_a_package_are_followed(tmp_path: Path) -> None:
    assert counts(
        tmp_path,
        pkg__INIT="",
        pkg__losses="import torch.nn.functional as F\n\n\ndef bce(p, y):\n"
        "    return F.binary_cross_entropy(p, y)\n",
        pkg__train="import torch\nfrom .losses import bce\n\n\ndef step(model, x, y):\n"
        "    with torch.autocast('cuda'):\n        return bce(model(x), y)\n",
    ) == {"MP104": 1}


def test_scripts_in_the_folder_of_a_package_find_their_neighbours(tmp_path: Path) -> None:
    assert counts(
        tmp_path,
        pkg__INIT="",
        pkg__losses="import torch.nn.functional as F\n\n\ndef bce(p, y):\n"
        "    return F.binary_cross_entropy(p, y)\n",
        pkg__main="import torch\nfrom losses import bce\n\n\ndef step(model, x, y):\n"
        "    with torch.autocast('cuda'):\n        return bce(model(x), y)\n",
    ) == {"MP104": 1}


def test_names_re_exported_by_a_package_are_followed(tmp_path: Path) -> None:
    assert counts(
        tmp_path,
        amp__INIT="from amp.contexts import cast\n",
        amp__contexts="import torch\n\n\ndef cast():\n    return torch.autocast('cuda')\n",
        main="from amp import cast\n\n\ndef step(model, x):\n"
        "    with cast():\n        model(x).mean().backward()\n",
    ) == {"MP105": 1, "MP110": 1}


_COMMON = "import torch.nn.functional as F\nfrom torch import nn\n\n_bce = F.binary_cross_entropy\n"
_STAR = """\
from common import *
import torch


def step(model, x, y):
    with torch.autocast("cuda"):
        return {loss}(model(x), y)


norm = nn.BatchNorm2d(8, momentum=0.99)
"""


def test_all_names_of_a_module_of_the_project_may_be_imported(tmp_path: Path) -> None:
    main = _STAR.format(loss="F.binary_cross_entropy")
    assert counts(tmp_path, common=_COMMON, main=main) == {"MP104": 1, "MP216": 1}
    listed = _COMMON + '__all__ = ["nn"]\n'
    assert counts(tmp_path, common=listed, main=main) == {"MP216": 1}
    private = _STAR.format(loss="_bce")
    assert counts(tmp_path, common=_COMMON, main=private) == {"MP216": 1}
    listed = _COMMON + '__all__ = ("nn", "_bce")\n'
    assert counts(tmp_path, common=listed, main=private) == {"MP104": 1, "MP216": 1}


def test_modules_that_import_all_names_of_each_other_do_no_harm(tmp_path: Path) -> None:
    circle = _COMMON + "from main import *\nfrom common import *\n"
    main = _STAR.format(loss="F.binary_cross_entropy")
    assert counts(tmp_path, common=circle, main=main) == {"MP104": 1, "MP216": 1}


def test_a_context_manager_of_the_project_that_yields_under_autocast_counts(tmp_path: Path) -> None:
    assert counts(
        tmp_path,
        main="import contextlib\nimport torch\n\n\n@contextlib.contextmanager\ndef cast():\n"
        "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        yield\n\n\n"
        "def step(model, x):\n    with cast():\n        model(x).mean().backward()\n",
    ) == {"MP105": 1}


def test_an_inherited_method_is_followed(tmp_path: Path) -> None:
    assert counts(
        tmp_path,
        base="import torch\n\n\nclass Base:\n    def clip(self, model):\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        main="from base import Base\n\n\nclass Trainer(Base):\n"
        "    def step(self, model, x, optimizer, scaler):\n"
        "        scaler.scale(model(x).mean()).backward()\n        self.clip(model)\n"
        "        scaler.step(optimizer)\n        scaler.update()\n",
    ) == {"MP106": 1}


def test_what_a_caller_adds_is_not_missing_in_the_function(tmp_path: Path) -> None:
    advance = "def advance(scaler, loss, optimizer):\n    scaler.scale(loss).backward()\n"
    advance += "    scaler.step(optimizer)\n"
    caller = "from steps import advance\n\n\ndef train(scaler, loss, optimizer):\n"
    assert counts(tmp_path, steps=advance) == {"MP108": 1}
    assert (
        counts(
            tmp_path,
            steps=advance,
            main=caller + "    advance(scaler, loss, optimizer)\n    scaler.update()\n",
        )
        == {}
    )


def test_a_compound_condition_excludes_its_other_branch(tmp_path: Path) -> None:
    text = """\
def step(engine, model, x):
    if engine.amp and engine.scaler is not None:
        engine.scaler.scale(model(x).mean()).backward()
        if engine.last:
            engine.scaler.step(engine.optimizer)
            engine.scaler.update()
    else:
        model(x).mean().backward()
        if engine.last:
            engine.optimizer.step()
"""
    assert counts(tmp_path, main=text) == {}


def test_one_unscale_for_each_optimizer_is_no_second_call(tmp_path: Path) -> None:
    text = """\
def unscale(scaler, optimizers):
    for optimizer in optimizers:
        scaler.unscale_(optimizer)


def step(model, x, scaler, optimizers, others):
    scaler.scale(model(x).mean()).backward()
    unscale(scaler, optimizers)
    unscale(scaler, others)
    scaler.update()
"""
    assert counts(tmp_path, main=text) == {}


def test_cpu_as_a_part_of_the_model_is_no_wait_for_a_result(tmp_path: Path) -> None:
    text = """\
def train(first, second_model, first_model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        loss = second_model(first_model(x).cpu()).mean()
        loss.backward()
        optimizer.step()
"""
    assert counts(tmp_path, main=text) == {}


def test_torch_in_its_own_source_keeps_its_names(tmp_path: Path) -> None:
    assert counts(
        tmp_path,
        torch__INIT="",
        torch__nn__INIT="",
        torch__nn__functional="def binary_cross_entropy(p, y):\n    return p\n",
        main="import torch\n\n\ndef step(model, x, y):\n    with torch.autocast('cuda'):\n"
        "        return torch.nn.functional.binary_cross_entropy(model(x), y)\n",
    ) == {"MP104": 1}


def test_removing_zero_grad_from_a_right_loop_is_found(tmp_path: Path) -> None:
    right = STEP.format(clip="")
    assert counts(tmp_path, main=right) == {}
    assert counts(tmp_path, main=right.replace("        optimizer.zero_grad()\n", "")) == {
        "MP201": 1
    }


def test_a_return_of_a_helper_does_not_end_the_loop_around_its_call(tmp_path: Path) -> None:
    text = """\
def advance(model, x, optimizer):
    model(x).mean().backward()
    optimizer.step()
    return x


def train(model, loader, optimizer):
    for x in loader:
        advance(model, x, optimizer)
"""
    assert counts(tmp_path, main=text) == {"MP201": 1}
    first = text.replace("        advance(", "        return advance(")
    assert counts(tmp_path, main=first) == {}


def test_an_output_of_two_branches_is_no_probability(tmp_path: Path) -> None:
    text = """\
import torch
import torch.nn.functional as F


class Net(torch.nn.Module):
    def forward(self, x):
        {early}
        return F.softmax(x, dim=1)


def train(x, y):
    F.cross_entropy(Net()(x), y).backward()
"""
    assert counts(tmp_path, main=text.format(early="x = x + 1")) == {"MP205": 1}
    early = "if self.training:\n            return x"
    assert counts(tmp_path, main=text.format(early=early)) == {}


def test_a_copy_of_a_model_is_another_model(tmp_path: Path) -> None:
    text = """\
import copy


def train(model, loader, optimizer):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    return {copied}.half()
"""
    assert counts(tmp_path, main=text.format(copied="copy.deepcopy(model)")) == {}
    assert counts(tmp_path, main=text.format(copied="model")) == {"MP101": 1}


def test_options_in_a_dictionary_are_arguments(tmp_path: Path) -> None:
    text = """\
import torch


def train(model, loader):
    options = {"lr": 0.1}
    scaler = torch.amp.GradScaler("cuda", **{"enabled": False})
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast(**{"device_type": "cuda", "dtype": torch.bfloat16}):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
    assert counts(tmp_path, main=text) == {}
    assert counts(tmp_path, main=text.replace('**{"enabled": False}', "")) == {"MP111": 1}


def test_the_loops_of_two_calls_of_a_function_are_two_loops(tmp_path: Path) -> None:
    body = "def train(opt, xs):\n    for x in xs:\n        opt.zero_grad()\n"
    (tmp_path / "main.py").write_text(f"{body}\n\ntrain(1, 2)\ntrain(3, 4)\n")
    project = Project()
    module = project.load(str(tmp_path / "main.py"))
    assert module is not None
    trace = trace_module(module, project, set())
    assert len({one.loops for one in trace.of("<loop>")}) == 2
