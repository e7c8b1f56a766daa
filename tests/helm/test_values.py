"""Wrong values are refused, by name, before anything is rendered."""

from typing import Any

import pytest
from helm_python import HelmError

from tests.helm.rendering import texts

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"podMonitr": {}}, "podMonitr"),
    "an unknown threshold": ({"rules": {"thresholds": {"grad_norm_hih": 1}}}, "grad_norm_hih"),
    "a threshold that is no number": (
        {"rules": {"thresholds": {"grad_norm_high": "much"}}},
        "grad_norm_high",
    ),
    "a negative threshold": ({"rules": {"thresholds": {"grad_norm_high": -1}}}, "grad_norm_high"),
    "an unknown duration": ({"rules": {"durations": {"stall": "1m"}}}, "stall"),
    "a duration without a unit": (
        {"rules": {"durations": {"stall_window": "ten"}}},
        "stall_window",
    ),
    "an unknown alert": ({"rules": {"severities": {"MpAgentX": {}}}}, "MpAgentX"),
    "an unknown severity": (
        {"rules": {"severities": {"MpAgentRunFailed": {"critical": "page"}}}},
        "MpAgentRunFailed",
    ),
    "a selector that is none": ({"rules": {"selectors": {"series": "team"}}}, "series"),
    "a runbook address with a template": (
        {"rules": {"runbookBase": "https://w/{{ .x }}"}},
        "runbookBase",
    ),
    "a scheme that is none": ({"podMonitor": {"scheme": "ftp"}}, "scheme"),
    "an interval in words": ({"podMonitor": {"interval": "often"}}, "interval"),
    "a port name that is too long": ({"podMonitor": {"port": "a-name-beyond-15"}}, "port"),
    "a port beyond the last": ({"agentSettings": {"settings": {"port": 70000}}}, "port"),
    "an unknown setting": ({"agentSettings": {"settings": {"layers": 1}}}, "layers"),
    "an ill-typed setting": (
        {"agentSettings": {"settings": {"layer_interval": "often"}}},
        "layer_interval",
    ),
    "a secret among the settings": ({"agentSettings": {"settings": {"token": "x"}}}, "token"),
    "thresholds for the agents alone": (
        {"agentSettings": {"settings": {"thresholds": {"grad_norm_high": 50}}}},
        "rules.thresholds",
    ),
    "a path that is not absolute": (
        {"agentSettings": {"settings": {"sd_dir": "targets"}}},
        "sd_dir",
    ),
    "a namespace that can be none": ({"agentSettings": {"namespaces": ["Ml_Team"]}}, "Ml_Team"),
    "two levels of an alert at one severity": (
        {
            "rules": {"severities": {"MpAgentGradientExplosion": {"critical": "warning"}}},
            "assumeApiVersions": ["monitoring.coreos.com/v1"],
        },
        "rules.severities.MpAgentGradientExplosion",
    ),
    "several collectors that are scraped": (
        {"collector": {"enabled": True, "replicas": 2}},
        "collector.replicas",
    ),
    "a password in an address": (
        {"collector": {"remoteWriteUrl": "https://me:secret@metrics.example.com/write"}},
        "remoteWriteUrl",
    ),
    "half a receiver": ({"alertmanagerConfig": {"slack": {"name": "x"}}}, "slack"),
    "routing with nowhere to go": (
        {
            "alertmanagerConfig": {"enabled": True},
            "assumeApiVersions": ["monitoring.coreos.com/v1alpha1"],
        },
        "alertmanagerConfig.slack",
    ),
    "a scrape of nothing": (
        {
            "scrapeConfig": {"enabled": True},
            "assumeApiVersions": ["monitoring.coreos.com/v1alpha1"],
        },
        "scrapeConfig.httpSdUrls",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_refused_by_name(case: str) -> None:
    values, name = WRONG[case]
    with pytest.raises(HelmError) as refused:
        texts(values)
    assert name in str(refused.value)
