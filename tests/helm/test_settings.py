"""Settings reach the agents as they were meant, and where they train."""

from typing import Any

import pytest

from mp_agent.settings import load_settings
from tests.helm.rendering import (
    NAMESPACES,
    NOTES,
    Object,
    objects,
    objects_of,
    of_kind,
    texts,
    values_file,
)


def test_settings_and_policy_reach_the_namespaces_in_which_jobs_train() -> None:
    made = objects_of("everything")
    settings = [one for one in made if one["metadata"]["name"] == "demo-mp-agent-settings"]
    assert [one["metadata"]["namespace"] for one in settings] == list(NAMESPACES)
    assert settings[0]["data"] == settings[1]["data"] == settings[2]["data"]
    policies = [one for one in made if one["kind"] == "NetworkPolicy"]
    ours = [one["metadata"]["namespace"] for one in policies if _selects_opted_in_pods(one)]
    assert ours == ["training", "research"]


def _selects_opted_in_pods(policy: Object) -> bool:
    return bool(policy["spec"]["podSelector"]["matchLabels"] == {"mp-agent.io/scrape": "true"})


def test_a_port_that_is_set_is_the_one_of_policy_and_notes() -> None:
    values = {"agentSettings": {"settings": {"port": 9500}}, "networkPolicy": {"enabled": True}}
    (policy,) = of_kind(objects(values), "NetworkPolicy")
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 9500}]
    assert "containerPort: 9500}" in texts({**values, **values_file("default")})[NOTES]


def _settings(values: dict[str, Any]) -> dict[str, str]:
    """Return the variables of the release's own ConfigMap."""
    found = next(
        item
        for item in of_kind(objects(values), "ConfigMap")
        if item["metadata"]["name"].endswith("-settings")
    )
    return dict(found["data"])


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
