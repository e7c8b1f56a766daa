"""The manifests for users are what the API servers take, and opt in as the chart expects."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.helm.definitions import validate
from tests.helm.pod_security import violations

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
CUSTOM = ("jobset.yaml", "trainjob.yaml")

Object = dict[str, Any]


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8")))


def pod_templates(value: Any) -> Iterator[Object]:
    """Yield every pod template in a manifest, however deep."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for item in value.values():
            yield from pod_templates(item)
    elif isinstance(value, list):
        for item in value:
            yield from pod_templates(item)


ALL = sorted(path.name for path in MANIFESTS.glob("*.yaml"))


@pytest.mark.parametrize("name", ["job.yaml", "job-with-sidecar.yaml"])
def test_jobs_are_what_the_api_server_takes(name: str) -> None:
    for document in documents(name):
        kubernetes_validate.validate(document, "1.34", strict=True)


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_jobs_fit_their_definitions(name: str) -> None:
    for document in documents(name):
        validate(document)


@pytest.mark.parametrize("name", ALL)
def test_every_pod_opts_in_outlasts_the_linger_and_needs_no_privilege(
    name: str,
) -> None:
    templates = [pod for document in documents(name) for pod in pod_templates(document)]
    assert templates
    for pod in templates:
        kubernetes_validate.validate(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x", **pod["metadata"]},
                "spec": pod["spec"],
            },
            "1.34",
            strict=True,
        )
        assert violations(pod["spec"]) == []
        assert pod["metadata"]["labels"]["mp-agent.io/scrape"] == "true"
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        ports = [port for container in containers for port in container.get("ports", [])]
        assert {"name": "mp-agent", "containerPort": 9464} in ports
        assert pod["spec"]["terminationGracePeriodSeconds"] >= 120


def test_the_sidecar_shares_memory_and_user_with_the_trainer() -> None:
    (job,) = documents("job-with-sidecar.yaml")
    (pod,) = pod_templates(job)
    (sidecar,), (trainer,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert sidecar["restartPolicy"] == "Always"
    shared = {"name": "mp-agent-shm", "mountPath": "/dev/shm/mp_agent"}
    for container in (sidecar, trainer):
        assert shared in container["volumeMounts"]
        assert {"name": "MP_AGENT_DIR", "value": "/dev/shm/mp_agent"} in container["env"]
        assert "runAsUser" not in container.get("securityContext", {})
    assert {"name": "MP_AGENT_NODE_AGENT", "value": "external"} in trainer["env"]
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000
