"""The rules of a release are those of `mp-agent rules`, with the release's numbers."""

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.alerting.rules import render_rules
from mp_agent.alerting.site import site_values
from mp_agent.alerting.values import Severity, Values, values_in_force
from mp_agent.settings import load_settings
from tests.alerting.promtool import render_tests
from tests.helm.rendering import objects, of_kind, values_file

OPERATOR = {"assumeApiVersions": ["monitoring.coreos.com/v1"]}
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def released(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the PrometheusRules' groups for the chart's values under `rules`."""
    found = of_kind(objects({**OPERATOR, "rules": rules}), "PrometheusRule")
    return _in_order(group for item in found for group in item["spec"]["groups"])


def rendered(values: Values, *, runbook_base: str = "") -> dict[str, Any]:
    text = render_rules(values, runbook_base=runbook_base)
    return _in_order(yaml.safe_load(text)["groups"])


def _in_order(groups: Iterable[Any]) -> dict[str, Any]:
    """Return a rule file with groups by name: objects of a cluster have no order."""
    return {"groups": sorted(groups, key=lambda group: group["name"])}


def _same_numbers(value: Any) -> Any:
    """Return a rule file with every duration in milliseconds and no layout in expressions."""
    import re

    if isinstance(value, dict):
        return {name: _same_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    if not isinstance(value, str):
        return value

    def milliseconds(found: "re.Match[str]") -> str:
        parts = re.findall(r"(\d+)(ms|s|m|h)", found[0])
        return f"{sum(int(number) * _MILLISECONDS[unit] for number, unit in parts)}ms"

    return " ".join(re.sub(r"\b(?:\d+(?:ms|s|m|h))+\b", milliseconds, value).split())


def test_the_defaults_are_the_committed_rules() -> None:
    assert _same_numbers(released({})) == _same_numbers(rendered(values_in_force()))


def test_changed_thresholds_and_durations_reach_every_rule() -> None:
    rules = {
        "thresholds": {"grad_norm_high": 50, "grad_norm_vanished": 0.0000001},
        "durations": {"stall_window": "25m30s", "overflow_window": 600, "explosion_window": "90s"},
    }
    values = values_in_force(
        {"grad_norm_high": 50.0, "grad_norm_vanished": 1e-7},
        {"stall_window": 1530.0, "overflow_window": 600.0, "explosion_window": 90.0},
    )
    assert _same_numbers(released(rules)) == _same_numbers(rendered(values))


def test_a_severity_is_changed_and_an_alert_is_dropped() -> None:
    severities = {
        "MpAgentRunVanished": {"warning": "info"},
        "MpAgentRunFailed": {"critical": "off"},
        "MpAgentCoverageLow": {"warning": False},
    }
    changed: dict[str, dict[Severity, Severity | None]] = {
        "MpAgentRunVanished": {Severity.WARNING: Severity.INFO},
        "MpAgentRunFailed": {Severity.CRITICAL: None},
        "MpAgentCoverageLow": {Severity.WARNING: None},
    }
    expected = rendered(values_in_force(severities=changed))
    assert _same_numbers(released({"severities": severities})) == _same_numbers(expected)


def test_links_follow_the_bases() -> None:
    spec = released(
        {"runbookBase": "https://wiki.example.com/books/", "dashboardBase": "https://g.example.com"}
    )
    alerts = [rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule]
    for alert in alerts:
        assert alert["annotations"]["runbook_url"].startswith("https://wiki.example.com/books/mp")
        assert alert["annotations"]["dashboard_url"].startswith("https://g.example.com/d/mp-agent")


def test_without_a_base_alerts_link_to_the_runbooks_of_the_run_s_agent() -> None:
    own = yaml.safe_load(render_rules(values_in_force()))
    released_links, rendered_links = (
        {
            rule["alert"]: rule["annotations"]["runbook_url"]
            for group in spec["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }
        for spec in (released({}), own)
    )
    assert released_links == rendered_links
    assert all("@" not in link for link in released_links.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "end"),
    [
        (
            "https://git.example.com/o/r/blob/main/alerting/runbooks",
            "/runbooks/mpagentrunfailed.md",
        ),
        ("https://wiki.example.com/{alert}/latest", "com/mpagentrunfailed/latest"),
    ],
)
def test_runbooks_are_linked_as_mp_agent_rules_links_them(base: str, end: str) -> None:
    spec = released({"runbookBase": base})
    assert _same_numbers(spec) == _same_numbers(rendered(values_in_force(), runbook_base=base))
    assert f"{end}\n" in yaml.safe_dump(spec, width=1000)


@pytest.mark.parametrize(
    "selectors",
    [{"series": 'cluster="a",namespace=~"ml-.*"'}, {"targets": 'job="watch/it\'s"'}],
)
def test_selectors_reach_every_rule(selectors: dict[str, str]) -> None:
    expected = rendered(values_in_force(selectors=selectors))
    assert _same_numbers(released({"selectors": selectors})) == _same_numbers(expected)


def test_agents_judge_by_the_same_numbers_and_severities(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {
        "thresholds": {"grad_norm_high": 50},
        "durations": {
            "stall_window": "25m30s",
            "overflow_window": 2_000_000,
        },
        "severities": {
            "MpAgentRunVanished": {"warning": "info"},
            "MpAgentRunFailed": {"critical": False},
        },
    }
    (settings,) = [
        found["data"]
        for found in of_kind(objects({"rules": rules}), "ConfigMap")
        if "MP_AGENT_THRESHOLDS" in found["data"]
    ]
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    values = site_values(load_settings()[0])
    assert _same_numbers(released(rules)) == _same_numbers(rendered(values))


def test_no_mark_is_left() -> None:
    import re

    text = yaml.safe_dump(released(values_file("everything")["rules"]))
    assert not re.findall(r"@\w+[+#@]", text)


@pytest.mark.long
@pytest.mark.e2e
def test_released_rules_pass_promtool_and_their_unit_tests_with_changed_numbers(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    """With the defaults they are the committed rules, whose unit tests run elsewhere."""
    rules = {"thresholds": {"underflow_layers": 0.07}, "durations": {"vanished_window": "31m"}}
    values = values_in_force({"underflow_layers": 0.07}, {"vanished_window": 1860.0})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(released(rules)))
    (tmp_path / "tests.yaml").write_text(render_tests(values, "rules.yaml", heading="changed"))
    promtool = server("promtool")
    touched = "MpAgentGradientUnderflow|MpAgentRunFailed"
    for command in (
        ["check", "rules", "rules.yaml"],
        ["test", "rules", "--run", touched, "tests.yaml"],
    ):
        ran = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
