"""Where an alert links to without a base: the pages of the run's node agent, if it is known."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mp_agent.alerting.conditions.run import RUN_FAILED
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics.run import PAGES
from tests.alerting.examples.catalog import examples_of
from tests.alerting.promtool import assert_passes, render_tests

_AGENT = "https://node-0:9464"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("url", "run", "runbook", "postmortem"),
    [
        (_AGENT, "demo", f"{_AGENT}/runbooks/mpagentrunfailed.md", f"{_AGENT}/postmortem/demo"),
        (_AGENT, "other", "", ""),
        ("javascript:alert(1)", "demo", "", ""),
    ],
)
def test_links_lead_to_the_pages_of_the_run_s_own_agent(
    server: Callable[[str], Path], tmp_path: Path, url: str, run: str, runbook: str, postmortem: str
) -> None:
    values = values_in_force()
    (tmp_path / RULES_FILE).write_text(render_rules(values, groups={"one": (RUN_FAILED,)}))
    examples = ((RUN_FAILED, (examples_of(RUN_FAILED).firing[0],)),)
    document = yaml.safe_load(render_tests(values, RULES_FILE, examples=examples, heading="x"))
    (test,) = document["tests"]
    labels = f'url="{url}",run="{run}",namespace="ml",job="train",instance="node-0:9464"'
    # Gone before the alert fires, as with a run that has ended.
    series = {"series": f"{PAGES.prometheus_name}{{{labels}}}", "values": "1x2 stale"}
    test["input_series"].append(series)
    alerts = [alert for moment in test["alert_rule_test"] for alert in moment.get("exp_alerts", ())]
    for alert in alerts:
        alert["exp_annotations"] |= {"runbook_url": runbook, "postmortem_url": postmortem}
    assert alerts
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    assert_passes(server("promtool"), tmp_path / "tests.yaml")
