"""Templates, hooks and the changelog have the form that their readers expect."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.version import __version__

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))
_RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", re.MULTILINE)
_KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_what_github_requires(path: Path) -> None:
    form = _load(path)
    assert {"name", "description", "body"} <= set(form)
    inputs = [entry for entry in form["body"] if entry["type"] != "markdown"]
    assert {entry["type"] for entry in inputs} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({entry["id"] for entry in inputs}) == len(inputs)
    assert all(entry["attributes"]["label"] for entry in inputs)


def test_a_bug_report_asks_for_the_doctors_output() -> None:
    body = _load(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml")["body"]
    (doctor,) = (entry for entry in body if entry.get("id") == "doctor")
    assert "mp-agent doctor" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]


def test_hooks_run_what_make_check_runs() -> None:
    (local,) = _load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for hook in local["hooks"]:
        command = hook["entry"].replace(".venv/bin/", "").replace(" --force-exclude", "")
        assert command in makefile.replace("$(BIN)/", "").replace(
            "ruff format --check", "ruff format"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_changelog_is_versioned() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    releases = [_numbers(version) for version in _RELEASE.findall(text)]
    assert len(releases) == len(sections) - 1, "## [1.2.3] - 2026-01-31"
    assert releases == sorted(releases, reverse=True)
    assert all(release <= _numbers(__version__) for release in releases)
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= _KINDS


def test_the_security_policy_supports_the_present_version() -> None:
    minor = ".".join(__version__.split(".")[:2])
    assert f"| {minor}.x | yes |" in (ROOT / "SECURITY.md").read_text("utf-8")
