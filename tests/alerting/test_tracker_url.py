"""An alert links the page of the run in an experiment tracker, where the run has one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mp_agent.alerting.conditions.run import RUN_FAILED
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from tests.alerting.examples.catalog import examples_of
from tests.alerting.promtool import assert_passes, render_tests

_NAME = BY_PROMETHEUS_NAME["mp_agent_tracker_info"].prometheus_name
_PAGE = "https://wandb.example/team/runs/1a2b"


@pytest.mark.parametrize(
    ("trackers", "url"),
    [
        ([("wandb", _PAGE, 'run="demo"')], _PAGE),
        # The first by name that has a page; files on a machine are none.
        (
            [
                ("wandb", _PAGE, 'run="demo"'),
                ("tensorboard", "file:///tmp/tensorboard/demo", 'run="demo"'),
                ("mlflow", "http://mlflow.example/#/runs/1", 'run="demo"'),
            ],
            "http://mlflow.example/#/runs/1",
        ),
        ([("wandb", "javascript:alert(1)", 'run="demo"'), ("mlflow", "", 'run="demo"')], ""),
        ([("wandb", _PAGE, 'run="other"'), ("wandb", _PAGE, 'run="demo",cluster="other"')], ""),
    ],
)
def test_the_page_is_that_of_the_run_s_first_tracker_with_one(
    server: Callable[[str], Path],
    tmp_path: Path,
    trackers: list[tuple[str, str, str]],
    url: str,
) -> None:
    values = values_in_force()
    (tmp_path / RULES_FILE).write_text(render_rules(values, groups={"one": (RUN_FAILED,)}))
    examples = ((RUN_FAILED, (examples_of(RUN_FAILED).firing[0],)),)
    document = yaml.safe_load(render_tests(values, RULES_FILE, examples=examples, heading="x"))
    (test,) = document["tests"]
    for tracker, address, run in trackers:
        labels = f'tracker="{tracker}",name="n",url="{address}",{run}'
        series = f'{_NAME}{{{labels},namespace="ml",job="train",instance="node-0:9464"}}'
        # Gone before the alert fires, as with a run that has ended.
        test["input_series"].append({"series": series, "values": "1x2 stale"})
    alerts = [alert for moment in test["alert_rule_test"] for alert in moment.get("exp_alerts", ())]
    for alert in alerts:
        alert["exp_annotations"]["tracker_url"] = url
    assert alerts
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    assert_passes(server("promtool"), tmp_path / "tests.yaml")
