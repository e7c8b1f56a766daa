"""What docs/otlp.md says holds: its configurations are whole, its variables and defaults real."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.sdk import environment_variables

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.exporters.otlp import environment, events, service, signal_pusher
from mp_agent.settings import Settings
from tests.subtests import each

TEXT = (Path(__file__).parents[3] / "docs" / "otlp.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]


def block(key: str) -> dict[str, Any]:
    """Return the first block with a top-level key."""
    return next(found for found in BLOCKS if key in found)


def test_every_block_is_a_mapping():
    assert len(BLOCKS) == 5
    assert all(isinstance(found, dict) for found in BLOCKS)


def test_the_collectors_pipelines_use_what_is_declared_and_nothing_is_idle():
    collector = block("service")
    for kind in ("receivers", "processors", "exporters"):
        used = {name for p in collector["service"]["pipelines"].values() for name in p[kind]}
        assert used == set(collector[kind])


def test_the_collector_gives_the_labels_that_belong_to_the_scraper():
    collector = block("service")
    (statements,) = collector["processors"]["transform/pod"]["metric_statements"]
    assert statements["context"] == "datapoint"
    rule = re.compile(r'set\(attributes\["(\w+)"\], resource\.attributes\["([\w.]+)"\]\)')
    found = [rule.fullmatch(statement) for statement in statements["statements"]]
    assert None not in found
    copied = {match[1]: match[2] for match in found if match}
    assert copied == {
        "namespace": "k8s.namespace.name",
        "pod": "k8s.pod.name",
        "node": "k8s.node.name",
    }
    extracted = collector["processors"]["k8sattributes"]["extract"]["metadata"]
    assert set(copied.values()) <= set(extracted)
    metrics = collector["service"]["pipelines"]["metrics"]["processors"]
    assert metrics.index("k8sattributes") < metrics.index("transform/pod")


def test_the_exporters_keep_names_as_the_rules_know_them():
    remote_write = next(b["exporters"] for b in BLOCKS if set(b) == {"exporters"})
    for found in (block("service")["exporters"]["prometheus"], *remote_write.values()):
        assert found["add_metric_suffixes"] is True
        assert found["resource_to_telemetry_conversion"] == {"enabled": False}
    assert block("service")["exporters"]["prometheus"]["without_scope_info"] is True
    assert block("otlp")["otlp"]["translation_strategy"] == "UnderscoreEscapingWithSuffixes"
    assert block("scrape_configs")["scrape_configs"][0]["honor_labels"] is True


def test_the_pod_gives_itself_what_the_resource_looks_for():
    given = {variable["name"] for variable in block("env")["env"]}
    looked_for = {name for names in events._POD_VARIABLES.values() for name in names}
    assert {"POD_NAME", "POD_UID", "NODE_NAME"} <= given & looked_for


@each("name", sorted(set(re.findall(r"\bOTEL_[A-Z_]+[A-Z]\b", TEXT))))
def test_every_variable_exists(name):
    exporters = {"OTEL_METRICS_EXPORTER", "OTEL_LOGS_EXPORTER", "OTEL_TRACES_EXPORTER"}
    protocol = "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"
    assert hasattr(environment_variables, name) or name in {*exporters, protocol}


def test_defaults_and_bounds_are_those_of_the_code():
    assert f"`{environment.DEFAULT_INTERVAL_SECONDS * 1000:.0f}`" in TEXT
    assert f"`{environment.DEFAULT_EXPORT_TIMEOUT_SECONDS * 1000:.0f}`" in TEXT
    assert f"| `{environment.DEFAULT_TIMEOUT_SECONDS:.0f}` |" in TEXT
    exit_wait = Settings.model_fields["otlp_exit_wait_seconds"].default
    assert f"`otlp_exit_wait_seconds` ({exit_wait:.0f})" in TEXT
    assert f"{events.POINTS_MAX} points" in TEXT
    assert service.RETRY_AFTER_SECONDS_MAX == 300.0
    assert signal_pusher.EVENT_KEPT_SECONDS == 3600.0
    assert "otlp_span_events" in Settings.model_fields


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(mp_agent_[a-z_]+)", TEXT))))
def test_every_metric_exists(name):
    assert name in BY_PROMETHEUS_NAME
