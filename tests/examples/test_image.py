"""The image's parts work: what it installs, what it starts without torch, what asks for health."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_it_is_built_from_all_that_the_package_holds() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = DOCKERFILE.splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert set(wheel["only-include"]) <= copied
    assert {str(Path(name).parent) for name in wheel["force-include"]} <= copied
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert not copied & set(ignored)


def test_it_is_pinned_and_runs_as_an_unprivileged_user() -> None:
    assert DOCKERFILE.startswith("# syntax=docker/dockerfile:1\n")
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${BASE}", "${BASE}"]
    before_stages = DOCKERFILE.partition("\nFROM ")[0]
    assert re.search(r"^ARG BASE=python:\d+\.\d+\.\d+-slim-\w+$", before_stages, re.MULTILINE)
    assert "\nUSER 1000:1000\n" in DOCKERFILE


def test_every_package_that_it_installs_is_pinned() -> None:
    """Each requirement, and all that it brings, has its version in constraints.txt."""
    assert re.search(r"pip install [^&]*--constraint constraints.txt", DOCKERFILE)
    pinned = {
        canonicalize_name(re.split(r"[=;<>\[ ]", line, maxsplit=1)[0])
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    }
    (wanted,) = re.findall(r"pip install .* '\.\[([a-z-]+)\]'", DOCKERFILE)
    installed = closure([Requirement(f"mp-agent[{wanted}]")])
    assert {"aiohttp", "grpcio", "requests"} < installed
    assert not {name for name in installed if name.startswith(("torch", "nvidia", "triton"))}
    assert installed - {"mp-agent"} <= pinned, sorted(installed - pinned)


def closure(wanted: Iterable[Requirement]) -> set[str]:
    """Return the names of the packages that requirements bring, as installed here."""
    found: set[tuple[str, str]] = set()
    pending = [(item, extra) for item in wanted for extra in item.extras or {""}]
    while pending:
        item, extra = pending.pop()
        if item.marker is not None and not item.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(item.name)
        if (name, extra) in found:
            continue
        found.add((name, extra))
        needs = [Requirement(text) for text in metadata.requires(name) or ()]
        pending += [(need, one) for need in needs for one in item.extras or {""}]
    return {name for name, _ in found}


def words_of(instruction: str) -> list[str]:
    """Return the words of an instruction in exec form, which is JSON."""
    found = re.search(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found
    return list(json.loads(found[1]))


@pytest.mark.slow
def test_what_it_starts_needs_no_torch_and_answers_the_question_for_its_health(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch in the image')\n")
    command = [*words_of("ENTRYPOINT"), *words_of("CMD")]
    assert command == ["mp-agent", "node"]
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        agent = subprocess.Popen(
            [Path(sys.executable).with_name(command[0]), *command[1:]],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(tmp_path),
                "MP_AGENT_DIR": str(tmp_path / "shm"),
                "MP_AGENT_PORT": "0",
            },
            stderr=stderr,
        )
    try:
        port = wait_until(lambda: re.findall(r"serving on .*:(\d+)", log.read_text()))[0]
        asks, *arguments = words_of("  CMD")
        assert asks == "python"
        check = [sys.executable, *(word.replace(":9464/", f":{port}/") for word in arguments)]
        subprocess.run(check, check=True)
    finally:
        agent.terminate()
        assert agent.wait(30) == 0
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(check, check=True, stderr=subprocess.DEVNULL)
