"""`--fix` edits what it names, and nothing else."""

import os
from pathlib import Path

import pytest

from mp_agent.lint.command import apply_fixes
from mp_agent.lint.runner import check_paths

BEFORE = """\
import torch   # kept
scaler = torch.cuda.amp.GradScaler( init_scale = 1024.0 )
ä = [torch.cuda.amp.autocast(), torch.cuda.amp.autocast(enabled=True)]\t# kept
old = torch.cuda.amp.autocast(True)
cpu = torch.cpu.amp.autocast(dtype=torch.bfloat16)
torch.autograd.set_detect_anomaly( True )
"""
AFTER = """\
import torch   # kept
scaler = torch.amp.GradScaler("cuda",  init_scale = 1024.0 )
ä = [torch.amp.autocast("cuda"), torch.amp.autocast("cuda", enabled=True)]\t# kept
old = torch.amp.autocast("cuda", enabled=True)
cpu = torch.amp.autocast("cpu", dtype=torch.bfloat16)
torch.autograd.set_detect_anomaly( False )
"""


def fixed(path: Path, content: bytes) -> bytes:
    file = path / "a.py"
    file.write_bytes(content)
    apply_fixes(check_paths(path).findings)
    return file.read_bytes()


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_calls_are_rewritten_in_any_encoding(tmp_path: Path, ending: str, encoding: str) -> None:
    declaration = "# coding: latin-1\n" if encoding == "latin-1" else ""
    before, after = (
        (declaration + text).replace("\n", ending).encode(encoding) for text in (BEFORE, AFTER)
    )
    assert fixed(tmp_path, before) == after
    assert fixed(tmp_path, after) == after
    assert check_paths(tmp_path).counts() == {}


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_the_fixed_code_means_the_same() -> None:
    torch = pytest.importorskip("torch")
    names: dict[str, object] = {}
    exec(AFTER, names)
    assert isinstance(names["scaler"], torch.amp.GradScaler)
    assert names["scaler"].get_scale() in (1024.0, 1.0)
    assert [context.device for context in names["ä"]] == ["cuda", "cuda"]  # type: ignore[attr-defined]
    assert names["cpu"].fast_dtype is torch.bfloat16  # type: ignore[attr-defined]
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize(
    "text",
    [
        "from torch.cuda.amp import autocast\n\ncontext = autocast()\n",
        "import torch\n\ncontext = torch.cuda.amp.autocast(\n    True\n)\n",
        "import torch\n\noptions = []\ncontext = torch.cuda.amp.autocast(*options)\n",
        "import torch\n\ncontext = torch.cuda.amp.autocast(True, torch.float16)\n",
        "import torch\n\non = True\ntorch.autograd.set_detect_anomaly(on)\n",
        "import torch\n\nx = torch.cuda.amp.autocast()  # mp-agent: ignore[MP112]\n",
    ],
)
def test_what_is_not_safe_is_left_alone(tmp_path: Path, text: str) -> None:
    assert fixed(tmp_path, text.encode()) == text.encode()


def test_permissions_stay_and_nothing_else_is_written(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("import torch\n\nx = torch.ones(1).half().sum()\n")
    (tmp_path / "a.py").touch(mode=0o750)
    before = (tmp_path / "b.py").stat().st_mtime_ns
    fixed(tmp_path, BEFORE.encode())
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(tmp_path)) == ["a.py", "b.py"]
    assert (tmp_path / "b.py").stat().st_mtime_ns == before
