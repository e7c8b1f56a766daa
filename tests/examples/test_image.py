"""The image's parts work: what it installs, what it starts without torch, what asks for health."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_it_is_built_from_all_that_the_package_holds() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = DOCKERFILE.splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert set(wheel["only-include"]) <= copied
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert not copied & set(ignored)


def test_it_installs_what_the_package_needs_and_no_torch() -> None:
    found = re.search(r"<<'LIST' > \S+\n(.*?)LIST\n", DOCKERFILE, re.DOTALL)
    assert found
    listed = subprocess.run(
        [sys.executable, "-c", found[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    project = PROJECT["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["otlp"]}
    left_out = wanted - set(listed.stdout.splitlines())
    assert [item.partition(">")[0] for item in left_out] == ["torch"]


def test_it_is_pinned_and_runs_as_nobody_special() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", bases[0])
    assert "\nUSER 1000:1000\n" in DOCKERFILE


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
