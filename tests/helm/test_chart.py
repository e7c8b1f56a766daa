"""The chart gives objects that a cluster takes, and only those that were asked for."""

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from helm_python import lint

from mp_agent.version import __version__
from tests.helm.pod_security import pod_specs, violations
from tests.helm.rendering import (
    CHART,
    NAMESPACES,
    NOTES,
    ROOT,
    VALUES,
    Object,
    objects,
    objects_of,
    of_kind,
    texts,
    values_file,
)
from tests.subtests import each

MATRIX = sorted(path.stem for path in VALUES.glob("*.yaml"))
KUBERNETES_VERSIONS = ("1.29", "1.34")
DASHBOARDS = ROOT / "grafana" / "dashboards"
ANNOTATION_BYTES_MAX = 256 * 1024
"""Of all annotations of an object; `kubectl apply` and GitOps tools keep a copy of it in one."""
SHARE_MAX = 0.6
"""Of that limit: metrics and rules are added, and sites add labels."""
RELEASE_BYTES_MAX = 1024 * 1024
"""Of a Secret, in which Helm keeps chart and manifests, compressed."""
CUSTOM_GROUPS = ("monitoring.coreos.com", "grafana.integreatly.org")


def is_custom(item: Object) -> bool:
    return str(item["apiVersion"]).startswith(CUSTOM_GROUPS)


@pytest.mark.parametrize("name", MATRIX)
def test_lint_finds_nothing_to_warn_of(name: str) -> None:
    report = lint(CHART, values_file(name), strict=True, namespace="monitoring")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@each("version", KUBERNETES_VERSIONS)
@each("name", MATRIX)
def test_core_objects_are_what_the_api_server_takes(name: str, version: str) -> None:
    core = [item for item in objects_of(name) if not is_custom(item)]
    assert core
    for item in core:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("name", MATRIX)
def test_every_object_has_the_recommended_labels_a_namespace_and_a_valid_name(name: str) -> None:
    for item in objects_of(name):
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "mp-agent"
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert labels["app.kubernetes.io/version"] == __version__
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", item["metadata"]["name"])
        if item["kind"].startswith("ClusterRole"):
            assert item["metadata"]["name"].endswith("-monitoring")
        else:
            assert len(item["metadata"]["name"]) <= 63
            assert item["metadata"]["namespace"] in NAMESPACES


@pytest.mark.parametrize("name", MATRIX)
def test_no_two_objects_share_a_name(name: str) -> None:
    keys = [
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        for item in objects_of(name)
    ]
    assert len(keys) == len(set(keys))


def test_release_and_namespace_may_be_called_by_a_number() -> None:
    for item in objects(values_file("collector"), release="7", namespace="2024"):
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "7"
        assert item["metadata"].get("namespace", "2024") == "2024"


def test_by_default_no_workload_runs() -> None:
    kinds = {item["kind"] for item in objects_of("default")}
    assert {"PodMonitor", "PrometheusRule", "ConfigMap"} <= kinds
    workloads = {"Deployment", "DaemonSet", "StatefulSet", "Job", "Service", "ClusterRole"}
    assert not kinds & workloads


def test_custom_resources_that_the_cluster_lacks_are_left_out_and_the_notes_say_so() -> None:
    values = {**values_file("everything"), "assumeApiVersions": ["v1/Pod"]}
    assert not any(map(is_custom, objects(values)))
    notes = " ".join(texts(values)[NOTES].split())
    assert "omitted, because this cluster lacks the CRDs" in notes
    for kind in (
        "monitoring.coreos.com/v1/PodMonitor",
        "monitoring.coreos.com/v1/PrometheusRule",
        "monitoring.coreos.com/v1alpha1/AlertmanagerConfig",
        "monitoring.coreos.com/v1alpha1/ScrapeConfig",
        "grafana.integreatly.org/v1beta1/GrafanaDashboard",
    ):
        assert kind in notes


def test_without_a_cluster_no_custom_resource_is_dropped_in_silence() -> None:
    values = {**values_file("everything"), "assumeApiVersions": []}
    kinds = {item["kind"] for item in filter(is_custom, objects(values))}
    assert kinds == {item["kind"] for item in filter(is_custom, objects_of("everything"))}


@pytest.mark.parametrize("wanted", [True, "true"])
def test_custom_resources_can_be_wanted_in_any_case(wanted: bool | str) -> None:
    values = {**values_file("default"), "assumeApiVersions": ["v1/Pod"]}
    assert not any(map(is_custom, objects(values)))
    kinds = {item["kind"] for item in objects({**values, "customResources": wanted})}
    assert {"PodMonitor", "PrometheusRule"} <= kinds


@pytest.mark.parametrize("wanted", [False, "false"])
def test_custom_resources_can_be_turned_off(wanted: bool | str) -> None:
    values = {**values_file("everything"), "customResources": wanted}
    assert not any(map(is_custom, objects(values)))
    notes = " ".join(texts(values)[NOTES].split())
    assert "omitted, because customResources is false" in notes


def test_a_kind_alone_can_be_there() -> None:
    values = {"assumeApiVersions": ["monitoring.coreos.com/v1/PodMonitor"]}
    assert [item["kind"] for item in filter(is_custom, objects(values))] == ["PodMonitor"]
    assert "monitoring.coreos.com/v1/PrometheusRule" in texts(values)[NOTES]


def test_notes_explain_pod_labels_and_where_series_are_and_name_the_release_trap() -> None:
    notes = texts(values_file("default"))[NOTES]
    assert 'mp-agent.io/scrape: "true"' in notes
    assert "{name: mp-agent, containerPort: 9464}" in notes
    assert "mp_agent_build_info" in notes
    assert "additionalLabels.release" in notes
    assert "omitted" not in notes


@pytest.mark.parametrize("release", ["demo", "mp-agent"])
def test_no_service_puts_settings_of_ours_into_pods(release: str) -> None:
    (service,) = of_kind(objects(values_file("collector"), release=release), "Service")
    variable = service["metadata"]["name"].upper().replace("-", "_")
    assert not variable.startswith("MP_AGENT")


def test_every_pod_is_one_that_a_restricted_namespace_takes() -> None:
    specs = list(pod_specs(objects_of("everything")))
    assert len(specs) == 2
    assert [violations(spec) for spec in specs] == [[], []]


def test_every_workload_asks_for_resources_and_has_a_memory_limit() -> None:
    for spec in pod_specs(objects_of("collector")):
        for container in spec["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, str):
        yield value


def test_no_mark_of_a_template_is_left_over() -> None:
    for name in MATRIX:
        for item in objects_of(name):
            if "dashboard" not in item["metadata"]["name"]:
                assert not [text for text in _texts_in(item) if "<no value>" in text]


def test_dashboards_arrive_as_they_are_but_for_white_space() -> None:
    committed = {path.name: json.loads(path.read_text()) for path in DASHBOARDS.glob("*.json")}
    values = {
        "assumeApiVersions": ["grafana.integreatly.org/v1beta1"],
        "grafanaDashboards": {"enabled": True},
    }
    made = objects(values)
    carried: dict[str, str] = {}
    for item in of_kind(made, "ConfigMap"):
        if item["metadata"]["labels"].get("grafana_dashboard") == "1":
            assert item["metadata"]["annotations"] == {"grafana_folder": "mp-agent"}
            carried |= item["data"]
    assert {name: json.loads(text) for name, text in carried.items()} == committed
    operated = of_kind(made, "GrafanaDashboard")
    assert {item["spec"]["json"] for item in operated} == set(carried.values())


def test_every_object_can_be_applied_by_a_client_that_annotates_it_with_itself() -> None:
    for item in objects_of("everything"):
        share = len(json.dumps(item)) / ANNOTATION_BYTES_MAX
        assert share <= SHARE_MAX, f"{item['metadata']['name']}: {share:.0%}; split it"


def test_helm_can_keep_the_release_in_a_secret() -> None:
    """Helm stores JSON with the chart's files in Base64 and the manifests, gzipped, in Base64."""
    files = {
        str(path): b64encode(path.read_bytes()).decode()
        for path in CHART.rglob("*")
        if path.is_file()
    }
    manifest = "".join(texts(values_file("everything")).values())
    stored = b64encode(gzip.compress(json.dumps([files, manifest]).encode()))
    assert len(stored) <= SHARE_MAX * RELEASE_BYTES_MAX
