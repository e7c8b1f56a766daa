"""The chart in the hands of the `helm` and `kubeconform` that people run.

The latter comes from no index that the tests install from: CI runs these where it is on PATH.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.definitions import VARIABLE, definitions
from tests.helm.rendering import CHART, VALUES, Object, objects_of
from tests.helm.test_chart import KUBERNETES_VERSIONS, MATRIX
from tools.helm import find_helm

CUSTOM_KINDS = {
    *("PodMonitor", "PrometheusRule", "AlertmanagerConfig", "ScrapeConfig", "GrafanaDashboard"),
}
"""Of which kubeconform has no schema of its own."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def program(name: str) -> Run:
    """Return a function that runs a program; skips where it cannot be had."""
    found = find_helm() if name == "helm" else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH")

    def run(*arguments: str, **given: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([found, *arguments], capture_output=True, text=True, **given)

    return run


def rendered(helm: Run, name: str) -> str:
    """Return what `helm template` prints for one of the values files."""
    values = str(VALUES / f"{name}.yaml")
    made = helm("template", "demo", str(CHART), "--namespace", "monitoring", "--values", values)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.e2e
@pytest.mark.parametrize("name", MATRIX)
def test_helm_lint_finds_nothing(name: str) -> None:
    helm = program("helm")
    checked = helm("lint", str(CHART), "--strict", "--values", str(VALUES / f"{name}.yaml"))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.e2e
@pytest.mark.parametrize("name", MATRIX)
def test_helm_template_gives_what_the_engine_in_the_tests_gives(name: str) -> None:
    text = rendered(program("helm"), name)
    made = [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]

    def by_name(item: Object) -> tuple[str, str]:
        return item["kind"], item["metadata"]["name"]

    assert sorted(made, key=by_name) == sorted(objects_of(name), key=by_name)


@pytest.mark.e2e
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", MATRIX)
def test_kubeconform_takes_every_object(name: str, version: str, tmp_path: Path) -> None:
    helm, kubeconform = program("helm"), program("kubeconform")
    own = ["-skip", ",".join(sorted(CUSTOM_KINDS))]
    if os.environ.get(VARIABLE):
        for (api, kind), schema in definitions().items():
            file = f"{kind.lower()}_{api.replace('/', '_')}.json"
            (tmp_path / file).write_text(json.dumps(schema))
        names = "{{.ResourceKind}}_{{.Group}}_{{.ResourceAPIVersion}}.json"
        own = ["-schema-location", f"{tmp_path}/{names}"]
    checked = kubeconform(
        *("-strict", "-summary", "-kubernetes-version", f"{version}.0"),
        *("-schema-location", "default", *own),
        input=rendered(helm, name),
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
