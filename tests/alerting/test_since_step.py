"""An alert says since which step, where the node agent's detectors know it."""

from collections.abc import Callable
from pathlib import Path

import yaml

from mp_agent.alerting.conditions.run import RUN_FAILED
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import run as run_metrics
from tests.alerting.examples.catalog import examples_of
from tests.alerting.promtool import assert_passes, render_tests

_NAME = run_metrics.CONDITION_SINCE_STEP.prometheus_name


def test_the_step_is_the_earliest_of_the_run_s_own_series(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    values = values_in_force()
    (tmp_path / RULES_FILE).write_text(render_rules(values, groups={"one": (RUN_FAILED,)}))
    examples = ((RUN_FAILED, (examples_of(RUN_FAILED).firing[0],)),)
    document = yaml.safe_load(render_tests(values, RULES_FILE, examples=examples, heading="x"))
    (test,) = document["tests"]
    for run, severity, step in (
        ('run="demo"', "critical", 1234),
        ('run="demo"', "warning", 1200),
        ('run="other"', "critical", 7),
        ('run="demo",cluster="other"', "critical", 8),
    ):
        labels = f'condition="MpAgentRunFailed",severity="{severity}",{run}'
        series = f'{_NAME}{{{labels},namespace="ml",job="train",instance="node-0:9464"}}'
        test["input_series"].append({"series": series, "values": f"{step}x30"})
    alerts = [alert for moment in test["alert_rule_test"] for alert in moment.get("exp_alerts", ())]
    for alert in alerts:
        annotations = alert["exp_annotations"]
        annotations["step"] = "1200"
        what, rest = annotations["summary"].split(". ", 1)
        annotations["summary"] = f"{what}, since step 1200. {rest}"
    assert alerts
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    assert_passes(server("promtool"), tmp_path / "tests.yaml")
