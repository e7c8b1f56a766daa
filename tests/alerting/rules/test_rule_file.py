import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.rules import RANK_RECORDS, RULES_FILE, render_rules, rendered_files
from mp_agent.alerting.values import MarkedValues, Severity, values_in_force
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from tests.every import for_every

_FOLLOWS_FROM = {condition.name: condition.follows_from for condition in CONDITIONS}
_ROOT = Path(__file__).parents[3]


def _alerts(**settings: Any) -> list[dict[str, Any]]:
    return [rule for rule in _rules(**settings) if "alert" in rule]


def _rules(**settings: Any) -> list[dict[str, Any]]:
    text = render_rules(
        values_in_force(**settings),
        runbook_base="https://r.example",
        dashboard_base="https://g.example",
    )
    document = yaml.safe_load(text)
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.mark.slow
def test_the_committed_files_are_those_of_the_catalog() -> None:
    for path, text in rendered_files().items():
        assert (_ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run `make generate`"


def test_there_is_one_rule_per_condition_and_severity() -> None:
    expected = [(c.name, level.severity.value) for c in CONDITIONS for level in c.levels]
    found = [(rule["alert"], rule["labels"]["severity"]) for rule in _alerts()]
    assert sorted(found) == sorted(expected)
    assert len(set(found)) == len(found)


@for_every(_alerts(), lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_a_rule_has_labels_and_annotations_that_routing_and_people_need(
    rule: dict[str, Any],
) -> None:
    assert rule["labels"]["component"] == "mp-agent"
    links = {"runbook_url", "dashboard_url"}
    optional = {"cause"} if _FOLLOWS_FROM[rule["alert"]] else set()
    is_critical = rule["labels"]["severity"] == "critical"
    optional = {*optional, "postmortem_url"} if is_critical else set()
    expected = {"summary", "description", "remedy", "step", "tracker_url", *links, *optional}
    assert set(rule["annotations"]) == expected
    templated = "{{" in rule["annotations"]["summary"]
    assert templated is is_critical
    assert "$labels.run }}" in rule["annotations"]["description"]
    assert "var-run={{ $labels.run | urlquery }}" in rule["annotations"]["dashboard_url"]
    assert rule["annotations"]["runbook_url"].endswith(f"/{rule['alert'].lower()}.md")
    assert "$" not in str(rule["labels"])
    assert "by (cluster, namespace, job, run" in rule["expr"]


def test_a_threshold_reaches_expression_and_description_and_no_label() -> None:
    (warning,) = (
        rule
        for rule in _alerts(thresholds={"grad_norm_high": 50})
        if rule["alert"] == "MpAgentGradientExplosion" and rule["labels"]["severity"] == "warning"
    )
    text = render_rules(values_in_force({"grad_norm_very_low": 0.0005}))
    assert "< 0.0005\n" in text and "below 0.0005 for" in text
    assert 'bound="high"' in text and 'bound="50"' not in text
    assert "above 50, " in warning["annotations"]["description"]


def test_what_levels_share_is_recorded_before_them_in_their_group() -> None:
    document = yaml.safe_load(render_rules(values_in_force()))
    for group in document["groups"]:
        names = ["record" in rule for rule in group["rules"]]
        assert names == sorted(names, reverse=True), f"{group['name']}: alerts before recordings"
        recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
        used = set(re.findall(r"run:\w+:\w+", " ".join(r["expr"] for r in group["rules"])))
        if group["name"].startswith("mp-agent.ranks."):
            assert used <= RANK_RECORDS and recorded <= RANK_RECORDS
        else:
            assert used == recorded
    every = [r["record"] for g in document["groups"] for r in g["rules"] if "record" in r]
    assert len(set(every)) == len(every)
    assert all(re.fullmatch(r"run(_[a-z]+)*:mp_agent_[a-z0-9_]+:[a-z_]+", name) for name in every)


def test_a_severity_can_be_changed_and_a_level_left_out() -> None:
    changes: dict[str, dict[Severity, Severity | None]] = {
        "MpAgentLossSpike": {Severity.WARNING: Severity.INFO},
        "MpAgentGradientExplosion": {Severity.INFO: None},
        "MpAgentCoverageLow": {Severity.WARNING: None},
        "MpAgentTelemetryDegraded": {Severity.WARNING: None},
    }
    found = {(r["alert"], r["labels"]["severity"]) for r in _alerts(severities=changes)}
    assert ("MpAgentLossSpike", "info") in found
    assert ("MpAgentLossSpike", "warning") not in found
    assert ("MpAgentGradientExplosion", "info") not in found
    assert ("MpAgentGradientExplosion", "critical") in found
    assert "mp-agent.agent" not in render_rules(values_in_force(severities=changes))


def test_a_selector_is_on_every_series_and_the_targets_have_their_own() -> None:
    selectors = {"series": 'cluster="a"', "targets": 'job="x"'}
    text = render_rules(values_in_force(selectors=selectors))
    expressions = " ".join(rule["expr"] for rule in _rules(selectors=selectors))
    for name, matchers in re.findall(r"(?<![:\w])(mp_agent_\w+)(\{[^}]*\})?", expressions):
        assert 'cluster="a"' in matchers, name
    assert 'up{job="x"}' in text


def test_numbers_can_be_left_as_marks_for_who_fills_them_in() -> None:
    """The chart does: its templates put the release's numbers in place of the marks."""
    plain = values_in_force()
    marked = MarkedValues(plain.limits, plain.seconds)
    text = render_rules(marked, runbook_base="https://x.example")
    assert set(re.findall(r"(?<!%)\[(\w+)\]", text)) == set()
    document = yaml.safe_load(text)
    for mark in set(re.findall(r"@([^@\s]+)@", text)):
        for name in mark.removesuffix("#").split("+"):
            assert name in plain.limits or name in plain.seconds
    assert sum(len(group["rules"]) for group in document["groups"]) == len(_rules())


def test_the_time_scale_reaches_every_range_offset_for_and_description() -> None:
    plain, scaled = (
        render_rules(values_in_force()),
        render_rules(values_in_force(time_scale=1 / 60)),
    )
    for text in ("[10m]", "offset 10m", "for: 2m", "keep_firing_for: 10m", "last 5m", "> 600"):
        assert text in plain
    for text in ("[10s]", "offset 10s", "for: 2s", "keep_firing_for: 10s", "last 5s", "> 10\n"):
        assert text in scaled
    assert set(re.findall(r"(?<!%)\[(\w+)\]", scaled)) == {
        "3s", "5s", "10s", "15s", "30s", "1m", "4m"
    }  # fmt: skip


def test_every_metric_in_the_rules_is_in_the_catalog() -> None:
    known = set(BY_PROMETHEUS_NAME)
    for name in set(re.findall(r"(?<!:)\bmp_agent_\w+", render_rules(values_in_force()))):
        assert name in known or re.sub("_(sum|count)$", "", name) in known


@pytest.mark.slow
def test_the_rule_file_says_how_it_was_made() -> None:
    first = rendered_files()[f"alerting/rendered/{RULES_FILE}"].splitlines()[0]
    assert first.startswith("# Generated by `mp-agent rules`")
