"""The chart gives objects that a cluster takes, and only those that were asked for."""

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from helm_python import lint

from mp_agent.settings import load_settings
from mp_agent.version import __version__
from tests.helm.rendering import CHART, NOTES, VALUES, Object, objects, of_kind, texts, values_file

MATRIX = sorted(path.stem for path in VALUES.glob("*.yaml"))
KUBERNETES_VERSIONS = ("1.29", "1.34")
CUSTOM_GROUPS = ("monitoring.coreos.com", "grafana.integreatly.org")


def is_custom(item: Object) -> bool:
    return item["apiVersion"].startswith(CUSTOM_GROUPS)


@pytest.mark.parametrize("name", MATRIX)
def test_lint_finds_nothing_to_warn_of(name: str) -> None:
    report = lint(CHART, values_file(name), strict=True, namespace="monitoring")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", MATRIX)
def test_core_objects_are_what_the_api_server_takes(name: str, version: str) -> None:
    core = [item for item in objects(values_file(name)) if not is_custom(item)]
    assert core
    for item in core:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("name", MATRIX)
def test_every_object_has_the_recommended_labels_a_namespace_and_a_valid_name(name: str) -> None:
    for item in objects(values_file(name)):
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "mp-agent"
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert labels["app.kubernetes.io/version"] == __version__
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", item["metadata"]["name"])
        assert len(item["metadata"]["name"]) <= 63
        if not item["kind"].startswith("ClusterRole"):
            assert item["metadata"]["namespace"] == "monitoring"


@pytest.mark.parametrize("name", MATRIX)
def test_no_two_objects_share_a_name(name: str) -> None:
    keys = [(item["kind"], item["metadata"]["name"]) for item in objects(values_file(name))]
    assert len(keys) == len(set(keys))


def test_by_default_no_workload_runs() -> None:
    kinds = {item["kind"] for item in objects(values_file("default"))}
    assert {"PodMonitor", "PrometheusRule", "ConfigMap"} <= kinds
    workloads = {"Deployment", "DaemonSet", "StatefulSet", "Job", "Service", "ClusterRole"}
    assert not kinds & workloads


def test_custom_resources_are_left_out_where_the_cluster_lacks_them_and_the_notes_say_so() -> None:
    values = {**values_file("everything"), "assumeApiVersions": []}
    assert not any(map(is_custom, objects(values)))
    notes = " ".join(texts(values)[NOTES].split())
    for group in ("monitoring.coreos.com/v1 ", "monitoring.coreos.com/v1alpha1", "grafana."):
        assert f"this cluster has no {group}" in notes


def test_notes_say_how_to_label_a_pod_and_how_to_see_series_and_name_the_release_trap() -> None:
    notes = texts(values_file("default"))[NOTES]
    assert 'mp-agent.io/scrape: "true"' in notes
    assert "{name: mp-agent, containerPort: 9464}" in notes
    assert "mp_agent_build_info" in notes
    assert "additionalLabels.release" in notes
    assert "this cluster has no" not in notes


def test_the_pod_monitor_finds_opted_in_pods_everywhere_and_names_their_training_job() -> None:
    (monitor,) = of_kind(objects(values_file("default")), "PodMonitor")
    spec = monitor["spec"]
    assert spec["selector"] == {"matchLabels": {"mp-agent.io/scrape": "true"}}
    assert spec["namespaceSelector"] == {"any": True}
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["port"] == "mp-agent"
    sources = [
        rule["sourceLabels"][0]
        for rule in endpoint["relabelings"]
        if rule.get("targetLabel") == "training_job"
    ]
    assert [source.removeprefix("__meta_kubernetes_pod_label_") for source in sources] == [
        "batch_kubernetes_io_job_name",
        "volcano_sh_job_name",
        "training_kubeflow_org_job_name",
        "jobset_sigs_k8s_io_jobset_name",
    ]


@pytest.mark.parametrize("name", MATRIX)
def test_no_service_puts_settings_of_ours_into_pods(name: str) -> None:
    for service in of_kind(objects(values_file(name)), "Service"):
        variable = service["metadata"]["name"].upper().replace("-", "_")
        assert not variable.startswith("MP_AGENT")


def _settings(values: dict[str, Any]) -> dict[str, str]:
    (found,) = (
        item
        for item in of_kind(objects(values), "ConfigMap")
        if item["metadata"]["name"].endswith("-settings")
    )
    return dict(found["data"] or {})


def test_settings_reach_the_agent_as_they_were_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _settings(values_file("everything")).items():
        monkeypatch.setenv(name, value)
    settings, ignored = load_settings()
    assert ignored == 0
    assert settings.layer_interval == 50
    assert settings.window_seconds == 60.5
    assert settings.exporters == ("prometheus", "otlp")
    assert settings.run == "nightly"
    assert settings.thresholds == {
        "grad_norm_high": 50.0,
        "grad_norm_vanished": 1e-7,
        "loss_scale_low": 256.0,
    }


def test_a_large_whole_number_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"agentSettings": {"settings": {"max_series": 2_000_000, "port": 9465}}}
    for name, value in _settings(values).items():
        monkeypatch.setenv(name, value)
    settings, ignored = load_settings()
    assert (settings.max_series, settings.port, ignored) == (2_000_000, 9465, 0)


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
        for item in objects(values_file(name)):
            if "dashboard" not in item["metadata"]["name"]:
                assert not [text for text in _texts_in(item) if "<no value>" in text]


def test_dashboards_arrive_byte_for_byte() -> None:
    committed = {path.name: path.read_text("utf-8") for path in CHART.glob("files/dashboards/*")}
    carried: dict[str, str] = {}
    for item in of_kind(objects(values_file("everything")), "ConfigMap"):
        if item["metadata"]["labels"].get("grafana_dashboard") == "1":
            assert item["metadata"]["annotations"] == {"grafana_folder": "mp-agent"}
            carried |= item["data"]
    assert carried == committed
    operated = of_kind(objects(values_file("everything")), "GrafanaDashboard")
    assert {item["spec"]["json"] for item in operated} == set(committed.values())


def test_the_collector_hands_on_what_it_takes() -> None:
    import yaml

    (made,) = (
        item
        for item in of_kind(objects(values_file("collector")), "ConfigMap")
        if "collector.yaml" in item["data"]
    )
    configuration = yaml.safe_load(made["data"]["collector.yaml"])
    pipeline = configuration["service"]["pipelines"]["metrics"]
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) <= set(configuration[part])
    assert pipeline["exporters"] == ["prometheus"]
    assert configuration["exporters"]["prometheus"]["without_scope_info"] is True
