"""The record of a condition and its examples are all that an alert on known metrics takes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mp_agent.alerting import descriptions
from mp_agent.alerting import pages as alerts_page
from mp_agent.alerting.alertmanager import configuration
from mp_agent.alerting.backtesting import Quantity, less_above
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.conditions.loss import LOSS_SPIKE
from mp_agent.alerting.detector.detector import Detector
from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import Compare, Series, limit
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import Severity, values_in_force
from mp_agent.backtest import past_runs
from mp_agent.backtest.log.training_log import Point, TrainingLog
from mp_agent.catalog.metric import gauge, info
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import resolve
from mp_agent.node.series.snapshot_builder import SnapshotBuilder
from tests.agent.node.series.test_snapshot_builder import export, series
from tests.alerting.examples.example import Example, Track, flat
from tests.alerting.promtool import assert_passes, render_tests
from tools.generators import metrics_reference as metrics_page

ACTIVATION = gauge(
    "mp_agent.made_up.abs_max",
    "{activation}",
    help="Largest magnitude of a module's output.",
    read=lambda run: 61_000.0,
)
LARGEST_MODULE = info(
    "mp_agent.largest_activation.info",
    labels=("module",),
    help="The module of that output.",
    read=lambda run: {("blocks.3.mlp",): 1.0},
)


_MODULE = {"module": "blocks.3.mlp"}
EXAMPLES = (
    Example(
        title="large outputs",
        minutes=20,
        tracks=(
            Track(ACTIVATION, (*flat(100, 10), 61_000)),
            Track(LARGEST_MODULE, (1,), _MODULE),
        ),
        fires={Severity.WARNING: "An output of run demo is 6.1e+04. It is of blocks.3.mlp."},
        at=15,
        not_yet=(11,),
    ),
    Example(title="small outputs", minutes=20, tracks=(Track(ACTIVATION, (100,)),)),
)


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> Condition:
    """A condition on metrics that the catalog does not have, as it would be with them."""
    by_name = {metric.prometheus_name: metric for metric in (*METRICS, LARGEST_MODULE)}
    monkeypatch.setattr(descriptions, "BY_PROMETHEUS_NAME", by_name)
    return Condition(
        name="MpAgentActivationNearOverflow",
        summary="Activations come near the end of FP16.",
        meaning="The next batch may overflow.",
        confirm="Look at the module.",
        remedies=("Run the module in FP32.",),
        why="FP32 goes further.",
        levels=(
            Level(
                severity=Severity.WARNING,
                when=Compare(Series(metric=ACTIVATION), ">", limit("loss_scale_reduced")),
                hold=duration("vanished_hold"),
                description="An output of run {run} is {value|number}."
                "{mp_agent_largest_activation_info| It is of |module}",
                reason="An odd batch passes.",
            ),
        ),
        quiet=("small outputs",),
        follows_from=("MpAgentLearningRateJump",),
        needs=((Quantity.ACTIVATIONS,),),
        knobs=(less_above("loss_scale_reduced"),),
        guidance=LOSS_SPIKE.guidance,
    )


def test_it_becomes_a_rule_whose_examples_promtool_confirms(
    condition: Condition, server: Callable[[str], Path], tmp_path: Path
) -> None:
    values = values_in_force({"loss_scale_reduced": 60_000})
    text = render_rules(values, groups={"activations": (condition,)})
    (tmp_path / RULES_FILE).write_text(text)
    tests = render_tests(values, RULES_FILE, examples=[(condition, EXAMPLES)], heading="of a test")
    (tmp_path / "tests.yaml").write_text(tests)
    assert_passes(server("promtool"), tmp_path / "tests.yaml")
    (rule,) = yaml.safe_load(text)["groups"][0]["rules"]
    assert rule["alert"] == condition.name
    assert "> 60000" in rule["expr"]


def test_it_becomes_a_detector(condition: Condition) -> None:
    detector = Detector((*CONDITIONS, condition), values_in_force())
    assert (condition.name, "warning") in detector.levels


def test_it_becomes_a_runbook(condition: Condition) -> None:
    page = alerts_page.render_runbook(condition, values_in_force())
    assert page.startswith(f"{alerts_page.GENERATED}\n\n# MpAgentActivationNearOverflow\n")
    assert "Tested not to fire on: small outputs." in page


def test_it_is_muted_while_its_cause_fires(
    condition: Condition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "CONDITIONS", (condition,))
    assert configuration.inhibit_rules()[-1] == {
        "source_matchers": [
            'component="mp-agent"',
            'severity=~"critical|warning"',
            'alertname=~"MpAgentLearningRateJump"',
        ],
        "target_matchers": [
            'component="mp-agent"',
            'severity=~"warning|info"',
            'alertname="MpAgentActivationNearOverflow"',
        ],
        "equal": ["cluster", "namespace", "job", "run"],
    }


def test_a_log_without_what_it_needs_does_not_show_it(
    condition: Condition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_runs, "CONDITIONS", (condition,))
    log = TrainingLog(name="run", source="x.csv", format="csv", points=(Point(step=1, loss=2.0),))
    (blind,) = past_runs.blind_spots(log)
    assert blind.reason == "the log does not hold outputs of modules"
    scraped = replace(log, quantities=frozenset({Quantity.ACTIVATIONS}))
    assert list(past_runs.blind_spots(scraped)) == []


def test_its_knob_makes_it_less_sensitive(condition: Condition) -> None:
    (knob,) = condition.knobs
    assert knob.moved({"loss_scale_reduced": 60_000}, 1.05) == {"loss_scale_reduced": 63_000}


def test_they_become_entries_of_the_references(
    condition: Condition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts_page, "CONDITIONS", (*CONDITIONS, condition))
    monkeypatch.setattr(metrics_page, "METRICS", (*METRICS, ACTIVATION, LARGEST_MODULE))
    alerts = alerts_page.render_reference(values_in_force())
    (metrics,) = metrics_page.reference_files().values()
    assert "| warning | Activations come near the end of FP16. |" in alerts
    assert "### MpAgentActivationNearOverflow\n" in alerts
    assert "### `mp_agent_made_up_abs_max`\n" in metrics


def test_its_metric_becomes_a_series() -> None:
    metrics = (*METRICS, ACTIVATION, LARGEST_MODULE)
    snapshot = SnapshotBuilder(resolve({}), 20_000, metrics=metrics).build([export()], 0.0)
    assert series(snapshot, "mp_agent_made_up_abs_max") == {("llama",): 61_000.0}
    assert series(snapshot, "mp_agent_largest_activation_info") == {("llama", "blocks.3.mlp"): 1.0}


def test_without_its_quiet_example_the_record_is_refused(condition: Condition) -> None:
    with pytest.raises(ValueError, match="quiet names at least one case"):
        replace(condition, quiet=())
