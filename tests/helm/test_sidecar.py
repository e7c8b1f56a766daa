"""A chart that has this one as a dependency gets the sidecar of the example, as README.md says."""

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart

from mp_agent.settings import Settings
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


def test_it_takes_a_token_and_a_certificate_from_secrets(parent: Path) -> None:
    """As README.md shows it: the values there, in the chart that has this one as a dependency."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(mp-agent:\n  sidecar:.*?)```", text, re.DOTALL)
    assert found
    values = yaml.safe_load(found[1])["mp-agent"]
    job = rendered(parent, **values)
    kubernetes_validate.validate(job, "1.29", strict=True)
    pod = job["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    given = {one["name"]: one for one in sidecar["env"]}
    assert given["MP_AGENT_TOKEN"]["valueFrom"]["secretKeyRef"]["name"]
    certificate = Path(given["MP_AGENT_TLS_CERTIFICATE"]["value"])
    mounts = {one["mountPath"]: one["name"] for one in sidecar["volumeMounts"]}
    secret = mounts[str(certificate.parent)]
    assert secret in {volume["name"] for volume in pod["volumes"] if "secret" in volume}
    assert {name.removeprefix("MP_AGENT_").lower() for name in given} <= set(Settings.model_fields)


def test_what_the_pod_shares_reaches_the_trainer_too(parent: Path) -> None:
    """The rings and their directory, whatever the sidecar gets on top."""
    job = rendered(parent, sidecar={"env": [{"name": "MP_AGENT_BIND", "value": "::"}]})
    pod = job["spec"]["template"]["spec"]
    (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
    directory = {"name": "MP_AGENT_DIR", "value": "/dev/shm/mp_agent"}
    assert directory in sidecar["env"]
    assert directory in trainer["env"]
    assert {"name": "MP_AGENT_BIND", "value": "::"} in sidecar["env"]
