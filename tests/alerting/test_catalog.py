"""The catalog against what conditions.md says of each alert, written down here independently."""

import pytest

from mp_agent.alerting.conditions import CONDITIONS, GROUPS, Condition
from mp_agent.alerting.durations import DURATIONS, Duration
from mp_agent.alerting.expressions import walk
from mp_agent.alerting.severity import Severity
from mp_agent.alerting.signals import Count, Length, Limit, Series
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import THRESHOLDS

_C, _W, _I = Severity.CRITICAL, Severity.WARNING, Severity.INFO

_SEVERITIES = {
    "MpAgentGradientExplosion": (_C, _W, _I),
    "MpAgentGradientVanishing": (_C, _W, _I),
    "MpAgentNonFiniteUpdate": (_C,),
    "MpAgentLossNonFinite": (_C,),
    "MpAgentLossScaleLowAndFalling": (_W,),
    "MpAgentLossScaleAtFloor": (_C,),
    "MpAgentOverflowRatioHigh": (_C, _W),
    "MpAgentRunStalled": (_C, _W),
    "MpAgentRunFailed": (_C,),
    "MpAgentRunVanished": (_W,),
}

_HOLD_SECONDS = {
    ("MpAgentGradientVanishing", _C): 120,
    ("MpAgentGradientVanishing", _W): 600,
    ("MpAgentGradientVanishing", _I): 1800,
}

_LIMITS = {
    ("MpAgentGradientExplosion", _C): {1000},
    ("MpAgentGradientVanishing", _C): {1e-6},
    ("MpAgentGradientVanishing", _W): {0.001},
    ("MpAgentGradientVanishing", _I): {0.01},
    ("MpAgentLossScaleLowAndFalling", _W): {128, 3, 500},
    ("MpAgentLossScaleAtFloor", _C): {1, 3, 0.03},
    ("MpAgentOverflowRatioHigh", _C): {0.1, 500},
    ("MpAgentOverflowRatioHigh", _W): {0.01, 0.001, 500},
    ("MpAgentRunStalled", _W): {10},
}
"""Numbers that a level must compare against, by its severity."""

_by_name = pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)


def test_each_alert_has_the_severities_that_it_should() -> None:
    found = {c.name: tuple(level.severity for level in c.levels) for c in CONDITIONS}
    assert found == _SEVERITIES


def test_thresholds_and_times_are_those_of_the_documents() -> None:
    levels = {(c.name, level.severity): level for c in CONDITIONS for level in c.levels}
    for key, limits in _LIMITS.items():
        nodes = list(walk(levels[key].when))
        nodes += [m.value for n in nodes if isinstance(n, Count | Series) for m in n.where
                  if isinstance(m.value, Limit)]  # fmt: skip
        assert limits <= {node.threshold.value for node in nodes if isinstance(node, Limit)}, key
    for key, seconds in _HOLD_SECONDS.items():
        hold = levels[key].hold
        assert hold is not None and hold.seconds == seconds, key


@_by_name
def test_a_condition_looks_at_catalog_metrics_only(condition: Condition) -> None:
    for level in condition.levels:
        assert level.metrics <= set(METRICS)


@_by_name
def test_counters_are_looked_at_by_their_change_only(condition: Condition) -> None:
    """A counter's bare value only tells how long the agent has been running."""
    changes = {"changes", "min_over_time", "present_over_time"}
    for level in condition.levels:
        for node in walk(level.when):
            if isinstance(node, Series) and node.metric.prometheus_name.endswith("_total"):
                assert node.over is not None and node.over[0] in changes


def test_every_duration_and_every_threshold_is_used() -> None:
    durations: set[Duration] = set()
    limits = set()
    for level in (level for condition in CONDITIONS for level in condition.levels):
        durations |= {part for part in (level.hold, level.keep) if part}
        for node in walk(level.when):
            for name in node.__dataclass_fields__:
                value = getattr(node, name)
                values = value if isinstance(value, tuple) else (value,)
                durations |= {part for part in values if isinstance(part, Duration)}
                limits |= {
                    m.value.threshold
                    for m in values
                    if isinstance(getattr(m, "value", None), Limit)
                }
            if isinstance(node, Limit):
                limits.add(node.threshold)
            if isinstance(node, Length):
                durations.add(node.duration)
    assert {d.name for d in DURATIONS} - {d.name for d in durations} == {"birth_window"}
    assert limits == set(THRESHOLDS)


def test_every_condition_is_in_one_group() -> None:
    assert sorted(c.name for c in CONDITIONS) == sorted(
        c.name for conditions in GROUPS.values() for c in conditions
    )


@_by_name
def test_examples_are_told_apart_by_their_titles(condition: Condition) -> None:
    titles = [example.title for example in (*condition.firing, *condition.quiet)]
    assert len(set(titles)) == len(titles)


def test_also_names_existing_alerts_and_severities() -> None:
    for condition in CONDITIONS:
        for example in (*condition.firing, *condition.quiet):
            for name, severities in example.also.items():
                assert set(severities) <= set(_SEVERITIES[name])
