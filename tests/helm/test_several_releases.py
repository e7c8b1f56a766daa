"""Two releases with the values that the chart's README gives share no target, rule or dashboard."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.helm.rendering import CHART, Object, objects, of_kind

ASSUMED = {"assumeApiVersions": ["monitoring.coreos.com/v1"]}


def values_of_team(column: int) -> dict[str, Any]:
    """Return the values of one column of the README's table."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Several releases in one cluster")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)`[^|]*\| `(.*?)` \| `(.*?)` \|$", section, re.MULTILINE)
    values: dict[str, Any] = dict(ASSUMED)
    for path, *cells in rows:
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        cell = cells[column]
        place[name] = cell if "=" in cell else yaml.safe_load(cell)
    return values


@pytest.fixture(scope="module")
def releases() -> tuple[list[Object], list[Object]]:
    return (
        objects(values_of_team(0), release="first"),
        objects(values_of_team(1), release="second"),
    )


def dashboards_of(made: list[Object]) -> dict[str, Any]:
    return {
        name: json.loads(text)
        for item in of_kind(made, "ConfigMap")
        if item["metadata"]["labels"].get("grafana_dashboard")
        for name, text in item["data"].items()
    }


def test_no_pod_is_scraped_by_both(releases: tuple[list[Object], list[Object]]) -> None:
    (first,), (second,) = (of_kind(made, "PodMonitor") for made in releases)
    namespaces = [
        set(monitor["spec"]["namespaceSelector"]["matchNames"]) for monitor in (first, second)
    ]
    assert namespaces[0].isdisjoint(namespaces[1])


def test_rules_look_at_their_own_release_s_series_alone(
    releases: tuple[list[Object], list[Object]],
) -> None:
    expressions, jobs = [], []
    for made in releases:
        (monitor,) = of_kind(made, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        (job,) = (
            r["replacement"] for r in endpoint["relabelings"] if r.get("targetLabel") == "job"
        )
        jobs.append(job)
        expressions.append(
            [
                rule["expr"]
                for item in of_kind(made, "PrometheusRule")
                for group in item["spec"]["groups"]
                for rule in group["rules"]
            ]
        )
    assert jobs[0] != jobs[1]
    assert len(expressions[0]) > 20
    for expression in expressions[0]:
        for selector in re.findall(r"\bmp_agent_\w+(\{[^}]*\})?", expression):
            assert f'job="{jobs[0]}"' in selector or not selector
    assert not set(expressions[0]) & set(expressions[1])


def test_dashboards_have_files_and_uids_of_their_own_and_link_to_each_other(
    releases: tuple[list[Object], list[Object]],
) -> None:
    first, second = map(dashboards_of, releases)
    assert len(first) == len(second) >= 5
    assert not set(first) & set(second)
    uids = [{board["uid"] for board in boards.values()} for boards in (first, second)]
    assert len(uids[0]) == len(first)
    assert not uids[0] & uids[1]
    for made, own in zip(releases, uids, strict=True):
        links = set(re.findall(r"/d/([\w-]+)", json.dumps(made, default=str)))
        assert links
        assert links <= own


def test_the_default_names_of_files_and_dashboards_stay_as_they_were() -> None:
    made = dashboards_of(objects(ASSUMED))
    assert {name.removesuffix(".json") for name in made} == {b["uid"] for b in made.values()}
    assert "mp-agent-run.json" in made
