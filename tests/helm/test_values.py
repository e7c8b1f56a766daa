"""Wrong values are refused, by name, before anything is rendered."""

from typing import Any

import pytest
from helm_python import HelmError

from mp_agent.alerting.durations import BY_NAME, DURATIONS
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.thresholds import DEFAULTS, THRESHOLDS, resolve
from mp_agent.errors import SettingError
from tests.helm.rendering import texts
from tests.subtests import each

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
    "any free port, which no pod can declare": (
        {"agentSettings": {"settings": {"port": 0}}},
        "port",
    ),
    "a prefix of names with capitals": ({"fullnameOverride": "My_Agent"}, "fullnameOverride"),
    "a prefix of names that ends with a hyphen": (
        {"fullnameOverride": "agent-"},
        "fullnameOverride",
    ),
    "a chart name with a blank": ({"nameOverride": "mp agent"}, "nameOverride"),
    "a name that is a number to YAML": ({"fullnameOverride": "1e3"}, "fullnameOverride"),
    "a name that is no text to YAML": ({"agentSettings": {"name": "yes"}}, "agentSettings/name"),
    "a label with a blank": ({"commonLabels": {"my team": "a"}}, "my team"),
    "a label's value that is too long": ({"additionalLabels": {"team": "a" * 64}}, "team"),
    "a label of pods that is empty": ({"podMonitor": {"podLabel": ""}}, "podLabel"),
    "a label's value with a template": (
        {"dashboards": {"labelValue": "{{ .Release.Name }}"}},
        "labelValue",
    ),
    "a selected label that is no text": (
        {"grafanaDashboards": {"instanceSelector": {"matchLabels": {"team": 5}}}},
        "matchLabels/team",
    ),
    "a namespace of Prometheus with capitals": (
        {"networkPolicy": {"prometheusNamespace": "Monitoring"}},
        "prometheusNamespace",
    ),
    "an image with a line end": ({"image": {"repository": "a\nb: c"}}, "repository"),
    "a tag that is empty": ({"collector": {"image": {"tag": ""}}}, "collector/image/tag"),
    "a policy that is none": ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    "an interval that is null": ({"podMonitor": {"interval": None}}, "missing property 'interval'"),
    "a prefix of uids with a slash": ({"dashboards": {"uidPrefix": "team/a"}}, "uidPrefix"),
    "a time-out longer than the interval": (
        {"podMonitor": {"interval": "5s", "scrapeTimeout": "10s"}},
        "podMonitor.scrapeTimeout is 10s; it must not exceed podMonitor.interval, which is 5s",
    ),
    "a time-out longer than the interval outside the cluster": (
        {"podMonitor": {"scrapeTimeout": "12s"}, "scrapeConfig": {"interval": "10s"}},
        "must not exceed scrapeConfig.interval",
    ),
    "a high threshold above the extreme one": (
        {"rules": {"thresholds": {"grad_norm_high": 5000}}},
        "rules.thresholds.grad_norm_high is 5000; it must be below grad_norm_extreme",
    ),
    "two thresholds that are equal": (
        {"rules": {"thresholds": {"grad_norm_high": 50, "grad_norm_extreme": 50}}},
        "it must be below grad_norm_extreme",
    ),
    "a window longer than the one that it must stay below": (
        {"rules": {"durations": {"stall_window": "45m"}}},
        "rules.durations.stall_window is 2700 s; it must be below long_stall_window",
    ),
    "a share above all": (
        {"rules": {"thresholds": {"underflow_layers": 1.5}}},
        "underflow_layers is 1.5; it is a share",
    ),
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


@each("case", WRONG)
def test_a_wrong_value_is_refused_by_name(case: str) -> None:
    values, name = WRONG[case]
    with pytest.raises(HelmError) as refused:
        texts(values)
    assert name in str(refused.value)


def test_the_chart_and_the_command_refuse_the_same_durations() -> None:
    for known in (one for one in DURATIONS if one.below):
        durations = {known.name: BY_NAME[known.below].seconds * 2}
        with pytest.raises(SettingError, match=f"{known.name} .*must be below"):
            values_in_force(durations=durations)
        with pytest.raises(HelmError, match=f"{known.name} .*must be below"):
            texts({"rules": {"durations": durations}})


def test_the_chart_and_the_command_refuse_the_same_thresholds() -> None:
    for threshold in (one for one in THRESHOLDS if one.below):
        thresholds = {threshold.name: DEFAULTS[threshold.below] * 2}
        if threshold.unit == "1" and thresholds[threshold.name] > 1:
            continue
        with pytest.raises(SettingError, match=f"{threshold.name} .*must be below"):
            resolve(thresholds)
        with pytest.raises(HelmError, match=f"{threshold.name} .*must be below"):
            texts({"rules": {"thresholds": thresholds}})


@pytest.mark.parametrize("name", ["additionalLabels", "commonLabels", "imagePullSecrets"])
def test_null_stands_for_no_labels_and_no_secrets(name):
    assert texts({name: None}) == texts({name: [] if name == "imagePullSecrets" else {}})
