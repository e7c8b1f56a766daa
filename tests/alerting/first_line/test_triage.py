"""The first line of a critical alert, as the detector writes it and as Prometheus expands it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.conditions.nonfinite import LOSS_NONFINITE
from mp_agent.alerting.first_line import ROLL_BACK, Triage, headline
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import Severity, values_in_force
from mp_agent.catalog.metrics import run
from tests.alerting.examples.catalog import examples_of
from tests.alerting.promtool import render_tests, unit_test
from tests.subtests import each

_CRITICAL = [
    (condition, level)
    for condition in CONDITIONS
    for level in condition.levels
    if level.severity is Severity.CRITICAL
]
_TRIAGE = Triage(
    weights="intact since {since}",
    now=f"{ROLL_BACK} on rank {{rank}}",
    updated=Triage(weights="damaged", now=ROLL_BACK),
)


def _line(since_step: int, **active: int) -> str:
    return headline(
        "It broke.",
        _TRIAGE,
        since_step=since_step,
        labels={"rank": "3"},
        causes=("MpAgentLearningRateJump",),
        active=active,
    )


def test_it_names_the_step_the_weights_and_the_one_thing_to_do() -> None:
    assert _line(812) == (
        "It broke, since step 812. Weights: intact since step 812. "
        "Now: stop, and resume from the last checkpoint before step 812 on rank 3."
    )


def test_the_step_to_roll_back_to_is_that_of_the_first_cause_that_began_no_later() -> None:
    assert "before step 800 on" in _line(812, MpAgentLearningRateJump=800)
    assert "before step 812 on" in _line(812, MpAgentLearningRateJump=813)
    assert "before step 812 on" in _line(812, MpAgentLossSpike=700)


def test_it_goes_back_to_a_step_only_where_there_is_one_before() -> None:
    assert _line(1).endswith(
        "resume from the initial weights, since it began with step 1 on rank 3."
    )
    assert "step 0" not in _line(1) and "before step 1" not in _line(1)
    assert "before step 2 on" in _line(2)
    assert "initial weights" in _line(812, MpAgentLearningRateJump=1)


def test_a_step_that_is_not_known_is_left_out() -> None:
    assert _line(0).startswith("It broke. Weights: intact since it began. ")
    assert "before it began" in _line(0, MpAgentLearningRateJump=5)


def test_weights_are_damaged_for_certain_once_they_were_updated_with_nan() -> None:
    assert "Weights: damaged. " in _line(812, MpAgentNonFiniteUpdate=812)


def test_the_step_to_roll_back_to_is_that_of_the_first_update_with_nan() -> None:
    """A loss of NaN on a step that was skipped, or whose gradients were finite, damages nothing."""
    assert _line(70, MpAgentNonFiniteUpdate=90, MpAgentRankNonFinite=70).endswith("before step 90.")
    assert _line(70, MpAgentNonFiniteUpdate=90, MpAgentGradientExplosion=80).endswith("step 80.")


def _line_of(condition: Condition, level: Level, since_step: int, rank: str, **active: int) -> str:
    assert level.triage is not None
    return headline(
        condition.summary,
        level.triage,
        since_step=since_step,
        labels={"rank": rank},
        causes=(),
        active=active,
    )


@pytest.mark.parametrize("nan_step", [0, 584])
def test_no_two_conditions_contradict_each_other_on_the_weights(nan_step) -> None:
    """Those that say "intact" without updates with NaN say "damaged" with them."""
    active = {"MpAgentNonFiniteUpdate": nan_step} if nan_step else {}
    for condition, level in _CRITICAL:
        line = _line_of(condition, level, 584, "3", **active)
        weights = line.partition("Weights: ")[2]
        assert not (nan_step and ("intact" in weights or "not known" in weights)), line
        assert "step step" not in line


@each(("condition", "level"), _CRITICAL)
def test_no_first_line_is_too_long_for_a_pager(condition, level) -> None:
    line = _line_of(condition, level, 1_234_567, "1023")
    assert len(line) < 300
    assert re.fullmatch(r".*, since step 1234567\. Weights: .*\. Now: .*\.", line)
    assert "{" not in line


@pytest.mark.parametrize("first_step", [800, 1])
def test_prometheus_expands_the_same_line_with_damage_and_cause(
    server: Callable[[str], Path], tmp_path: Path, first_step: int
) -> None:
    values = values_in_force()
    (tmp_path / RULES_FILE).write_text(render_rules(values, groups={"one": (LOSS_NONFINITE,)}))
    examples = ((LOSS_NONFINITE, (examples_of(LOSS_NONFINITE).firing[0],)),)
    document = yaml.safe_load(render_tests(values, RULES_FILE, examples=examples, heading="x"))
    (test,) = document["tests"]
    began = {
        "MpAgentLossNonFinite": 812,
        "MpAgentNonFiniteUpdate": 812,
        "MpAgentLearningRateJump": first_step,
        "MpAgentGradientExplosion": 900,
    }
    for condition, step in began.items():
        labels = f'condition="{condition}",severity="critical",run="demo"'
        series = f"{run.CONDITION_SINCE_STEP.prometheus_name}{{{labels},"
        series += 'namespace="ml",job="train",instance="node-0:9464"}'
        test["input_series"].append({"series": series, "values": f"{step}x30"})
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    done = unit_test(server("promtool"), tmp_path / "tests.yaml")
    got = (done.stdout + done.stderr).partition("got:")[2]
    found = {name: json.loads(text) for name, text in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', got)}
    (level,) = LOSS_NONFINITE.levels
    assert level.triage is not None
    assert found["summary"] == headline(
        LOSS_NONFINITE.summary,
        level.triage,
        since_step=812,
        labels={},
        causes=LOSS_NONFINITE.follows_from,
        active=began,
    )
    back = "the initial weights" if first_step == 1 else "the last checkpoint before step 800"
    assert back in found["summary"] and "Weights: damaged, since" in found["summary"]
    assert found["cause"] == (
        f"MpAgentLearningRateJump since step {first_step}, MpAgentNonFiniteUpdate since step 812"
    )
