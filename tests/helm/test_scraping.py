"""Prometheus reaches what the chart promises: pods, the collector, jobs outside the cluster."""

import re
from typing import Any

import pytest
import yaml

from tests.helm.rendering import ROOT, objects, objects_of, of_kind, values_file


def test_the_pod_monitor_finds_opted_in_pods_everywhere_and_names_their_training_job() -> None:
    (monitor,) = of_kind(objects_of("default"), "PodMonitor")
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


def _collector(values: dict[str, Any]) -> dict[str, Any]:
    (made,) = (
        item for item in of_kind(objects(values), "ConfigMap") if "collector.yaml" in item["data"]
    )
    return dict(yaml.safe_load(made["data"]["collector.yaml"]))


@pytest.mark.parametrize(
    ("name", "exporter"), [("collector", "prometheus"), ("everything", "prometheusremotewrite")]
)
def test_the_collector_hands_on_all_that_agents_send(name: str, exporter: str) -> None:
    configuration = _collector(values_file(name))
    pipelines = configuration["service"]["pipelines"]
    assert pipelines.keys() == {"metrics", "logs", "traces"}
    for pipeline in pipelines.values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(configuration[part])
    assert pipelines["metrics"]["exporters"] == [exporter]


def test_a_collector_that_writes_nowhere_is_scraped_with_the_labels_that_series_have() -> None:
    made = objects_of("collector")
    (monitor,), (service,), (deployment,) = (
        of_kind(made, kind) for kind in ("ServiceMonitor", "Service", "Deployment")
    )
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    targets = {port["targetPort"] for port in service["spec"]["ports"]}
    assert targets <= {port["name"] for port in container["ports"]}
    assert not of_kind(objects_of("everything"), "ServiceMonitor")


def test_jobs_outside_the_cluster_are_asked_on_the_ports_of_the_slurm_example_alone() -> None:
    example = yaml.safe_load((ROOT / "examples" / "slurm" / "prometheus.yml").read_text("utf-8"))
    (keep,) = (
        rule
        for rule in example["scrape_configs"][0]["relabel_configs"]
        if rule.get("action") == "keep"
    )
    (scrape,) = of_kind(objects_of("everything"), "ScrapeConfig")
    first = scrape["spec"]["relabelings"][0]
    assert first["action"] == "keep"
    ports = [9463, 9464, 9479, 9480, 19464, 22]
    kept, kept_in_example = (
        [port for port in ports if re.fullmatch(regex, f"node-0:{port}")]
        for regex in (first["regex"], keep["regex"])
    )
    assert kept == kept_in_example == [9464, 9479]


def test_a_short_interval_shortens_the_time_out_that_is_not_set() -> None:
    values = {"assumeApiVersions": ["monitoring.coreos.com/v1"], "podMonitor": {"interval": "5s"}}
    (monitor,) = of_kind(objects(values), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["interval"], endpoint["scrapeTimeout"]) == ("5s", "5s")
