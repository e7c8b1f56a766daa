"""What a release publishes, as far as it can be seen without publishing."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from mp_agent.version import __version__
from tools.docs_site.__main__ import list_versions

ROOT = Path(__file__).parents[2]
FILES = ("agent/version.py", "helm/mp-agent/Chart.yaml", "CHANGELOG.md")
_USES = re.compile(r"actions/[a-z-]+@v\d+|pypa/gh-action-pypi-publish@release/v1")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    # YAML 1.1 reads the key `on` as true.
    return {("on" if key is True else key): value for key, value in yaml.safe_load(text).items()}


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_only_a_tag_starts_it_and_rights_are_given_job_by_job(workflow: dict[str, Any]) -> None:
    assert workflow["on"].keys() == {"push"} and workflow["on"]["push"].keys() == {"tags"}
    assert workflow["permissions"] == {"contents": "read"}
    writing = {
        name: [right for right, level in job["permissions"].items() if level == "write"]
        for name, job in workflow["jobs"].items()
        if "permissions" in job
    }
    assert writing == {
        "package": ["id-token"],
        "image": ["packages"],
        "chart": ["packages"],
        "site": ["contents"],
        "page": ["contents"],
    }


def test_nothing_is_published_before_all_checks_and_tests(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]

    def before(name: str) -> set[str]:
        needed = set(jobs[name].get("needs", []))
        return needed.union(*map(before, needed))

    for name in ("package", "image", "chart", "site", "page"):
        assert {"version", "check", "build"} <= before(name)
    assert jobs["check"]["strategy"]["matrix"]["target"] == ["check", "test", "test-long"]


def test_steps_are_whole_and_store_no_secret(workflow: dict[str, Any]) -> None:
    for step in steps_of(workflow):
        if "uses" in step:
            assert _USES.fullmatch(step["uses"])
        else:
            done = subprocess.run(
                ["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")


def compared(workflow: dict[str, Any], directory: Path, tag: str) -> int:
    (step,) = (step for step in steps_of(workflow) if step.get("name") == "Compare")
    # GitHub runs steps with -e.
    command = ["bash", "-e", "-c", step["run"]]
    environment = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=directory, env=environment, check=False).returncode


@pytest.mark.parametrize("behind", [None, *FILES])
def test_a_tag_that_is_not_the_version_everywhere_ends_it(
    workflow: dict[str, Any], tmp_path: Path, behind: str | None
) -> None:
    for name in FILES:
        text = (ROOT / name).read_text("utf-8").replace("## [Unreleased]", f"## [{__version__}]")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace(__version__, "0.0.9") if name == behind else text)
    assert (compared(workflow, tmp_path, f"v{__version__}") == 0) == (behind is None)


def git(*command: str, at: Path) -> str:
    identity = {"GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/bin:/bin", "HOME": str(at)}
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", *command],
        cwd=at,
        env=identity,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_a_release_publishes_its_documents_next_to_earlier_ones(
    workflow: dict[str, Any], tmp_path: Path
) -> None:
    published, checkout = tmp_path / "published.git", tmp_path / "checkout"
    git("init", "--quiet", "--bare", str(published), at=tmp_path)
    steps = {step.get("name"): step for step in workflow["jobs"]["site"]["steps"]}
    for number in ("0.1.0", "0.2.0"):
        shutil.rmtree(checkout, ignore_errors=True)
        git("init", "--quiet", str(checkout), at=tmp_path)
        git("commit", "--quiet", "--allow-empty", "--message=source", at=checkout)
        git("remote", "add", "origin", str(published), at=checkout)
        given = {"GITHUB_REF_NAME": f"v{number}", "GITHUB_ACTOR": "a", "PATH": "/usr/bin:/bin"}
        for name in ("Take the versions that are published", "Publish"):
            # GitHub runs steps with -e.
            command = ["bash", "-e", "-c", steps[name]["run"]]
            subprocess.run(command, cwd=checkout, env=given, check=True, capture_output=True)
            if name != "Publish":  # what the step between them does
                (checkout / "site" / number).mkdir()
                (checkout / "site" / number / "page.html").write_text(number)
                list_versions(checkout / "site")
    assert "tools.docs_site" in steps["Build this one"]["run"]
    files = git("ls-tree", "-r", "--name-only", "gh-pages", at=published).splitlines()
    pages = [f"{name}/page.html" for name in ("0.1.0", "0.2.0", "latest")]
    assert files == [".nojekyll", *pages[:2], "index.html", pages[2], "versions.html"]
    assert git("show", "gh-pages:latest/page.html", at=published) == "0.2.0"


def test_paths_that_are_packaged_exist(workflow: dict[str, Any]) -> None:
    (step,) = (s for s in steps_of(workflow) if s.get("name") == "Package chart and documents")
    path = re.compile(r"(?<= )(?:[a-z]+/[a-z-]+|docs|[A-Z]+\.md)(?= |$)", re.MULTILINE)
    names = path.findall(step["run"])
    assert {"helm/mp-agent", "docs", "README.md", "alerting/runbooks"} <= set(names)
    assert all((ROOT / name).exists() for name in names)


@pytest.fixture
def build_hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import hatch_build.py, whose hatchling is there in an isolated build alone."""
    for name, base in (
        ("hatchling.builders.hooks.plugin.interface", "BuildHookInterface"),
        ("hatchling.metadata.plugin.interface", "MetadataHookInterface"),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{base: object}))
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_index_links_to_the_repository(build_hooks: Any) -> None:
    text = "[a](docs/a.md#b), ![p](docs/p.png), [![p](p.svg)](x.md), [w](https://w.org), [t](#top)"
    assert build_hooks.absolute_links(text, "https://g.com/o/r") == (
        "[a](https://g.com/o/r/blob/main/docs/a.md#b), "
        "![p](https://g.com/o/r/raw/main/docs/p.png), "
        "[![p](https://g.com/o/r/raw/main/p.svg)](https://g.com/o/r/blob/main/x.md), "
        "[w](https://w.org), [t](#top)"
    )


def test_the_readme_on_the_index_has_no_relative_link(build_hooks: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = build_hooks.IndexPage()
    page.root = str(ROOT)
    metadata = {"urls": project["urls"]}
    page.update(metadata)
    readme: Any = metadata["readme"]
    assert readme["content-type"] == "text/markdown"
    links = re.findall(r"\]\(([^)\s]+)", readme["text"])
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "readme" in project["dynamic"]
