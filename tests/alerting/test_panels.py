"""What the runbooks add to each condition's record."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.panels import RUN_MARK, Guidance, Panel
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.errors import CatalogError
from tests.alerting.examples.catalog import examples_of
from tests.alerting.promtool import assert_passes, render_tests
from tools.servers.running import prometheus

_ROOT = Path(__file__).parents[2]
_GUIDANCE = {condition.name: condition.guidance for condition in CONDITIONS}


def test_queries_name_metrics_of_the_catalog() -> None:
    for name, guidance in _GUIDANCE.items():
        if "__name__" not in guidance.query:
            named = set(re.findall(r"\bmp_agent_\w+", guidance.query))
            assert named <= set(BY_PROMETHEUS_NAME), name


def test_panels_are_on_the_dashboards_under_their_titles() -> None:
    shown = {}
    for path in (_ROOT / "grafana" / "dashboards").glob("*.json"):
        board = json.loads(path.read_text())
        for drawn in _panels(board["panels"]):
            shown[board["uid"], drawn["id"]] = drawn["title"]
    for name, guidance in _GUIDANCE.items():
        for panel in guidance.panels:
            assert shown.get((panel.board, panel.id)) == panel.title, f"{name}: {panel}"


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def test_a_real_prometheus_answers_every_query(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("groups: []\n")
    with prometheus(
        server("prometheus"), tmp_path, rules=rules, alertmanager_url="http://127.0.0.1:1"
    ) as running:
        for guidance in _GUIDANCE.values():
            assert running.query(guidance.query) == []


@pytest.mark.slow
def test_a_query_finds_the_series_of_a_run_that_has_the_condition(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    """On the first firing example of each condition, at the moment at which it fires."""
    examples = tuple((condition, (examples_of(condition).firing[0],)) for condition in CONDITIONS)
    document = yaml.safe_load(
        render_tests(values_in_force(), "rules.yaml", examples=examples, heading="x")
    )
    (tmp_path / "rules.yaml").write_text("groups: []\n")
    for (condition, (example,)), test in zip(examples, document["tests"], strict=True):
        query = condition.guidance.query.replace(f'run="{RUN_MARK}"', 'run="demo"')
        test.pop("alert_rule_test", None)
        test["promql_expr_test"] = [
            {
                "expr": f"clamp_max(count({query}), 1)",
                "eval_time": f"{example.at}m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
        ]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    assert_passes(server("promtool"), tmp_path / "tests.yaml")


_PANEL = Panel(board="mp-agent-run", id=1, title="State")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"causes": ()}, "never empty"),
        ({"samples": ()}, "never empty"),
        ({"harm": "bad"}, "not a complete sentence"),
        ({"causes": ("A reason",)}, "not a complete sentence"),
        ({"query": "mp_agent_loss"}, "is not of one run"),
    ],
)
def test_guidance_that_leaves_something_open_is_refused(
    changes: dict[str, Any], problem: str
) -> None:
    fields: dict[str, Any] = {
        "harm": "Bad.",
        "query": 'mp_agent_loss{run="RUN"}',
        "reading": "The loss.",
        "causes": ("A reason.",),
        "false_positives": ("None known.",),
        "samples": ("mark_phases",),
        "panels": (_PANEL,),
    }
    Guidance(**fields)
    with pytest.raises(CatalogError, match=problem):
        Guidance(**{**fields, **changes})
