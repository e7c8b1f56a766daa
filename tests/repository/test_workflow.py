"""The CI workflow is one that GitHub accepts, and tests what the package declares."""

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
_CLASSIFIER = "Programming Language :: Python :: "

STEP = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "run": {"type": "string"},
        "uses": {"type": "string", "pattern": r"^actions/[a-z-]+@v\d+$"},
        "with": {"type": "object"},
    },
    "additionalProperties": False,
    "oneOf": [{"required": ["run"]}, {"required": ["uses"]}],
}
JOB = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "runs-on": {"const": "ubuntu-latest"},
        "container": {"type": "string"},
        "timeout-minutes": {"type": "integer", "minimum": 1},
        "needs": {"type": "array", "items": {"type": "string"}},
        "strategy": {"type": "object", "required": ["matrix", "fail-fast"]},
        "steps": {"type": "array", "items": STEP, "minItems": 1},
    },
    "required": ["name", "runs-on", "timeout-minutes", "steps"],
    "additionalProperties": False,
}
WORKFLOW = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "on": {"type": "object", "required": ["push", "pull_request"]},
        "permissions": {"const": {"contents": "read"}},
        "concurrency": {"type": "object", "required": ["group", "cancel-in-progress"]},
        "env": {"type": "object"},
        "jobs": {"type": "object", "additionalProperties": JOB},
    },
    "required": ["name", "on", "permissions", "concurrency", "jobs"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    # YAML 1.1 reads the key `on` as true.
    loaded = {("on" if key is True else key): value for key, value in yaml.safe_load(text).items()}
    jsonschema.validate(loaded, WORKFLOW)
    return loaded


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project: dict[str, Any] = table["project"]
    return project


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _declared_pythons(project: dict[str, Any]) -> list[str]:
    return [
        version
        for classifier in project["classifiers"]
        if (version := classifier.removeprefix(_CLASSIFIER)) != classifier and "." in version
    ]


def _combinations(matrix: dict[str, Any]) -> set[tuple[str, str]]:
    excluded = {(entry["python"], entry["torch"]) for entry in matrix["exclude"]}
    product = {(python, torch) for python in matrix["python"] for torch in matrix["torch"]}
    assert excluded <= product, "an exclusion that excludes nothing"
    return (product - excluded) | {(entry["python"], entry["torch"]) for entry in matrix["include"]}


def test_the_matrix_has_the_versions_of_python_that_are_declared(
    workflow: dict[str, Any], project: dict[str, Any]
) -> None:
    pythons = workflow["jobs"]["test-fast"]["strategy"]["matrix"]["python"]
    assert pythons == _declared_pythons(project)
    assert project["requires-python"] == f">={min(pythons, key=_version)}"


def test_the_matrix_has_the_oldest_and_the_newest_torch(
    workflow: dict[str, Any], project: dict[str, Any]
) -> None:
    (oldest,) = (
        found[1]
        for item in project["optional-dependencies"]["torch"]
        if (found := re.fullmatch(r"torch>=([\d.]+)", item))
    )
    (newest,) = re.findall(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE
    )
    assert workflow["jobs"]["test-fast"]["strategy"]["matrix"]["torch"] == [f"{oldest}.0", newest]


def test_every_python_is_tested_with_an_old_torch_and_the_newest(workflow: dict[str, Any]) -> None:
    matrix = workflow["jobs"]["test-fast"]["strategy"]["matrix"]
    combinations = _combinations(matrix)
    newest = matrix["torch"][-1]
    for python in matrix["python"]:
        torches = {torch for tested, torch in combinations if tested == python}
        assert newest in torches and len(torches) == 2, python


def test_jobs_run_targets_that_exist_and_need_no_secret(workflow: dict[str, Any]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    made = [
        command.removeprefix("make ").replace("${{ matrix.target }}", target)
        for job in workflow["jobs"].values()
        for target in job.get("strategy", {}).get("matrix", {}).get("target", [""])
        for step in job["steps"]
        if (command := step.get("run", "")).startswith("make ")
    ]
    assert sorted(made) == [
        *("check", "test", "test-chart TORCH=none"),
        *("test-fast TORCH=${{ matrix.torch }}", "test-long"),
    ]
    assert {command.split()[0] for command in made} <= set(targets)
    assert "secrets" not in (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
