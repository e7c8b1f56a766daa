"""A chart that has this one as a dependency gets the sidecar of the example, as README.md says."""

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart

from mp_agent.version import __version__
from tests.helm.rendering import CHART, ROOT

EXAMPLE = ROOT / "examples" / "kubernetes" / "job-with-sidecar.yaml"
SWITCHED_OFF = ("podMonitor", "rules", "dashboards", "agentSettings", "tests")


def job_of_the_readme() -> str:
    """Return the template that README.md shows."""
    found = re.search(r"```\n(\{\{- \$agent.*?)```", (CHART / "README.md").read_text(), re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    shutil.copytree(CHART, tmp_path / "charts" / "mp-agent")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "job.yaml").write_text(job_of_the_readme())
    dependency = {"name": "mp-agent", "version": __version__}
    metadata = {"apiVersion": "v2", "name": "trainer", "version": "7.7.7"}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump({**metadata, "dependencies": [dependency]}))
    return tmp_path


def rendered(parent: Path, **values: Any) -> dict[str, Any]:
    """Return the job; nothing else may come from the dependency."""
    chosen: dict[str, Any] = {name: {"enabled": False} for name in SWITCHED_OFF}
    chosen["agentSettings"]["name"] = "mp-agent-settings"
    chosen["image"] = {"repository": "registry.example.com/mp-agent"}
    made = Chart.load(parent).render(
        {"mp-agent": {**chosen, **values}}, name="llama-finetune", namespace="training"
    )
    (text,) = (text for name, text in made.items() if name.endswith(".yaml") and text.strip())
    return dict(yaml.safe_load(text))


def test_the_job_is_the_example(parent: Path) -> None:
    job = rendered(parent)
    kubernetes_validate.validate(job, "1.29", strict=True)
    assert job == yaml.safe_load(EXAMPLE.read_text("utf-8"))


def test_linger_and_grace_period_change_together(parent: Path) -> None:
    job = rendered(parent, sidecar={"lingerSeconds": 300})
    pod = job["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    assert {"name": "MP_AGENT_LINGER_SECONDS", "value": "300"} in sidecar["env"]
    assert pod["terminationGracePeriodSeconds"] > 300
