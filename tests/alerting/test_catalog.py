"""The catalog against what conditions.md says of each alert, written down here independently."""

import dataclasses
from collections.abc import Iterator
from pkgutil import iter_modules

from mp_agent.alerting import conditions as package
from mp_agent.alerting.conditions import CONDITIONS, GROUPS, Condition
from mp_agent.alerting.descriptions import LabelMark
from mp_agent.alerting.durations import DURATIONS, Duration
from mp_agent.alerting.expressions import (
    Compare,
    Count,
    Expression,
    Length,
    Limit,
    Recorded,
    Seen,
    Series,
    Signal,
    walk,
)
from mp_agent.alerting.values import Severity
from mp_agent.catalog.metrics import METRICS
from mp_agent.catalog.thresholds import DEFAULTS
from tests.alerting.examples.catalog import examples_of
from tests.every import for_every

_C, _W, _I = Severity.CRITICAL, Severity.WARNING, Severity.INFO

_SEVERITIES = {
    "MpAgentGradientExplosion": (_C, _W, _I),
    "MpAgentGradientVanishing": (_C, _W, _I),
    "MpAgentGradientUnderflow": (_W,),
    "MpAgentGradientAtFloor": (_I,),
    "MpAgentLayerGradientDead": (_W,),
    "MpAgentNonFiniteUpdate": (_C,),
    "MpAgentLossNonFinite": (_C,),
    "MpAgentLossSpike": (_W,),
    "MpAgentLossDiverging": (_C, _W),
    "MpAgentLossScaleLowAndFalling": (_W,),
    "MpAgentGradientNonFinite": (_C, _W),
    "MpAgentNothingTrained": (_C, _W),
    "MpAgentLayerGradientExplosion": (_W,),
    "MpAgentLayersWithoutGradient": (_W, _I),
    "MpAgentUnlikeBaseline": (_W,),
    "MpAgentClippingBeforeUnscale": (_W,),
    "MpAgentGradientsAddUp": (_W,),
    "MpAgentGradientsDiscarded": (_W,),
    "MpAgentClippingAfterStep": (_W,),
    "MpAgentWorkersRepeatBatches": (_W,),
    "MpAgentStepRepeated": (_W,),
    "MpAgentGradientsLeftScaled": (_W,),
    "MpAgentClippingWithoutGradients": (_W,),
    "MpAgentFp16WithoutLossScale": (_W,),
    "MpAgentLossInputMismatch": (_W,),
    "MpAgentTargetsBroadcast": (_W,),
    "MpAgentClippingOneByOne": (_W,),
    "MpAgentClippingByShard": (_W,),
    "MpAgentTargetsMisaligned": (_W,),
    "MpAgentCausalMaskMissing": (_W,),
    "MpAgentPaddingInTargets": (_W,),
    "MpAgentEvaluatedInTrainingMode": (_W,),
    "MpAgentLossIn16Bits": (_W,),
    "MpAgentBatchNormMomentum": (_W,),
    "MpAgentAccumulationBypassed": (_W,),
    "MpAgentBetasSwapped": (_W,),
    "MpAgentEpochRepeated": (_W,),
    "MpAgentSeedRepeated": (_W,),
    "MpAgentOptimizerNeverSteps": (_W,),
    "MpAgentLeftInEvaluation": (_W,),
    "MpAgentAutocastWithoutEffect": (_W,),
    "MpAgentLearningRateJump": (_W,),
    "MpAgentLearningRateFallen": (_W,),
    "MpAgentLayersCutOff": (_W,),
    "MpAgentTiedWeightsParted": (_W,),
    "MpAgentOptimizerStateLost": (_W,),
    "MpAgentScheduleBegunAgain": (_W,),
    "MpAgentNothingLoaded": (_W,),
    "MpAgentRunRestarting": (_C,),
    "MpAgentPrecisionLint": (_I,),
    "MpAgentLossScaleAtFloor": (_C,),
    "MpAgentLossScaleConsecutiveDecreases": (_W,),
    "MpAgentLossScaleFarBelowInitial": (_C,),
    "MpAgentLossScaleLow": (_W, _I),
    "MpAgentOverflowRatioHigh": (_C, _W),
    "MpAgentRunStalled": (_C, _W),
    "MpAgentRunFailed": (_C,),
    "MpAgentRunVanished": (_W,),
    "MpAgentGradientsNotReduced": (_C,),
    "MpAgentReplicaDivergence": (_C, _W),
    "MpAgentRankNonFinite": (_C,),
    "MpAgentRankStraggler": (_W,),
    "MpAgentRankStalled": (_C,),
    "MpAgentCoverageLow": (_W,),
    "MpAgentTelemetryDegraded": (_W,),
    "MpAgentHeadroomVanishing": (_I,),
    "MpAgentSecondMomentStale": (_W,),
    "MpAgentUpdatesLost": (_W,),
    "MpAgentAdamEpsilonUnsafe": (_C, _W),
    "MpAgentActivationNonFinite": (_C,),
    "MpAgentActivationNearOverflow": (_W,),
    "MpAgentAttentionLogitGrowth": (_W,),
    "MpAgentOutputLogitDivergence": (_W,),
    "MpAgentRouterCollapse": (_W,),
    "MpAgentFp8Saturation": (_W,),
    "MpAgentFp8Underflow": (_W,),
    "MpAgentTrainInferenceMismatch": (_C, _W),
    "MpAgentPolicyEntropyCollapsed": (_W,),
    "MpAgentReductionSwallows": (_W,),
    "MpAgentDimensionImbalance": (_W,),
}

_HOLD_SECONDS = {
    ("MpAgentRankStraggler", _W): 300,
    ("MpAgentCoverageLow", _W): 300,
}

_LIMITS: dict[tuple[str, Severity], set[float]] = {
    ("MpAgentGradientExplosion", _C): {1000},
    ("MpAgentGradientVanishing", _C): {1e-6, 120},
    ("MpAgentGradientVanishing", _W): {0.001, 600},
    ("MpAgentGradientVanishing", _I): {0.01, 1800},
    ("MpAgentLossScaleLowAndFalling", _W): {60},
    ("MpAgentLossScaleAtFloor", _C): {1},
    ("MpAgentLossScaleFarBelowInitial", _C): {240},
    ("MpAgentLossScaleLow", _W): {600},
    ("MpAgentLossScaleLow", _I): {900},
    ("MpAgentGradientUnderflow", _W): {0.05, 300},
    ("MpAgentRankStraggler", _W): {1.3},
    ("MpAgentRankStalled", _C): {10},
    ("MpAgentOverflowRatioHigh", _C): {0.1},
    ("MpAgentOverflowRatioHigh", _W): {0.01, 0.001},
    ("MpAgentRunStalled", _W): {10},
    ("MpAgentUpdatesLost", _W): {0.5, 20},
    ("MpAgentHeadroomVanishing", _I): {0.05, 300},
    ("MpAgentAttentionLogitGrowth", _W): {100, 2},
    ("MpAgentOutputLogitDivergence", _W): {100, 2},
    ("MpAgentAdamEpsilonUnsafe", _W): {300},
    ("MpAgentReductionSwallows", _W): {0.01, 300},
    ("MpAgentDimensionImbalance", _W): {1e4, 300},
}
"""Numbers that a level must compare against, by its severity."""

_COUNTED = {
    "unreduced_steps": 64,
    "autocast_fp32_share": 0.5,
    "grad_norm_high": 100,
    "grad_norm_extreme": 1000,
    "grad_norm_growth": 10,
    "grad_norm_low": 0.01,
    "grad_norm_very_low": 0.001,
    "grad_norm_vanished": 1e-6,
    "layer_fall": 0.001,
    "layer_growth": 100,
    "learning_rate_jump": 10,
    "learning_rate_fall": 0.001,
    "untrained_steps": 48,
    "loss_lost_steps": 64,
    "loss_growth": 2,
    "loss_spike_noisy_deviations": 12,
    "loss_trend_deviations": 3,
    "nonfinite_gradients": 3,
    "loss_scale_floor": 1,
    "floor_skips": 3,
    "floor_skip_steps": 100,
    "calibration_steps": 500,
    "nonfinite_losses": 3,
    "loss_spike_deviations": 6,
    "loss_deviation_floor": 0.01,
    "layer_dead_abs_max": 1e-10,
    "layer_dead_samples": 3,
    "layer_zero_rise": 0.2,
    "layer_flushed": 0.31,
    "moment_rms_high": 2.3,
    "moment_rms_samples": 2,
    "fp16_near_overflow": 60_000,
    "attention_logit_high": 100,
    "router_entropy_low": 0.25,
    "router_load_high": 3,
    "router_collapse_samples": 3,
    "fp8_range_used_high": 4,
    "fp8_range_used_low": 6.1e-5,
    "fp8_scaling_samples": 3,
    "logprob_k3_high": 0.01,
    "logprob_k3_extreme": 0.1,
    "logprob_delta_tail": 0.1,
    "policy_entropy_fallen": 0.05,
    "loss_scale_reduced": 10_000,
    "loss_scale_very_low": 1024,
    "loss_scale_low": 128,
    "loss_scale_decreases_in_row": 5,
    "loss_scale_net_decreases": 3,
    "loss_scale_change_steps": 600,
    "loss_scale_fall_steps": 43_200,
    "loss_scale_share_of_initial": 0.01,
    "loss_scale_share_of_calibrated": 0.125,
    "overflow_warning": 0.01,
    "overflow_critical": 0.1,
    "overflow_rising": 0.001,
    "overflow_skips": 3,
    "overflow_steps": 300,
    "overflow_share_steps": 1000,
    "overflow_rise_steps": 5000,
    "loss_solved": 0.001,
    "underflow_layers": 0.05,
    "fp16_flushed": 0.05,
    "fp16_headroom_bits": 1,
    "updates_lost": 0.5,
    "adam_below_epsilon": 0.5,
    "reduction_swallowed": 0.01,
    "dimension_imbalance": 1e4,
    "fp8_flushed": 0.5,
}
"""Numbers that the node agent compares against, step by step."""

_by_name = for_every(CONDITIONS, lambda condition: condition.name)


def test_each_alert_has_the_severities_that_it_should() -> None:
    found = {c.name: tuple(level.severity for level in c.levels) for c in CONDITIONS}
    assert {name: found[name] for name in _SEVERITIES} == _SEVERITIES


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
    """A counter's bare value only says how long the agent has been running."""
    changes = {"changes", "min_over_time", "present_over_time"}
    for level in condition.levels:
        nodes = list(walk(level.when))
        only_seen = {node.signal for node in nodes if isinstance(node, Seen)}
        for node in nodes:
            if isinstance(node, Series) and node.metric.prometheus_name.endswith("_total"):
                assert node in only_seen or (node.over and node.over[0] in changes)


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
    of_texts = {"scrape_gap", "cause_window"}
    assert {d.name for d in DURATIONS} == {d.name for d in durations} | of_texts
    assert {limit.name for limit in limits} | set(_COUNTED) == set(DEFAULTS)


def test_what_the_node_agent_counts_against_is_said_by_its_metrics() -> None:
    counted = {name for metric in METRICS for name in metric.thresholds}
    assert {name: DEFAULTS[name] for name in counted} == _COUNTED


@_by_name
def test_each_level_says_why_it_waits_as_long_as_it_does(condition: Condition) -> None:
    for level in condition.levels:
        assert level.reason.endswith(".") and level.reason[0].isupper()
        assert len(level.reason) > 20


def test_what_several_conditions_look_at_is_recorded_in_the_group_of_all_of_them() -> None:
    """Counts are what is dear to evaluate; a signal that two conditions share has a name."""
    users: dict[Signal, set[str]] = {}
    groups: dict[str, set[str]] = {}
    for group, conditions in GROUPS.items():
        for condition in conditions:
            for level in condition.levels:
                for signal in _unrecorded(level.when):
                    users.setdefault(signal, set()).add(condition.name)
                for node in walk(level.when):
                    if isinstance(node, Recorded):
                        groups.setdefault(node.name, set()).add(group)
                        assert not any(isinstance(n, Recorded) for n in walk(node.signal))
    shared = {signal: names for signal, names in users.items() if len(names) > 1}
    assert not shared
    assert all(len(found) == 1 for found in groups.values()), groups


def _unrecorded(expression: Expression) -> Iterator[Signal]:
    """Yield the counts, and series over a range, that stand under no name."""
    if isinstance(expression, Recorded):
        return
    if isinstance(expression, Count) or (isinstance(expression, Series) and expression.over):
        yield expression
    for field in dataclasses.fields(expression):
        value = getattr(expression, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Expression):
                yield from _unrecorded(part)


@_by_name
def test_descriptions_name_series_of_the_catalog(condition: Condition) -> None:
    for level in condition.levels:
        assert any(isinstance(part, LabelMark) and part.label == "run" for part in level.parts)


def test_every_record_of_a_subject_is_in_the_catalog() -> None:
    subjects = [getattr(package, module.name) for module in iter_modules(package.__path__)]
    found = [each for subject in subjects for each in vars(subject).values()]
    records = {each.name for each in found if isinstance(each, Condition)}
    assert records == {condition.name for condition in CONDITIONS}


@_by_name
def test_examples_are_told_apart_by_their_titles(condition: Condition) -> None:
    titles = [example.title for example in examples_of(condition).all]
    assert len(set(titles)) == len(titles)


def test_also_names_existing_alerts_and_severities() -> None:
    for condition in CONDITIONS:
        for example in examples_of(condition).all:
            for name, severities in example.also.items():
                assert set(severities) <= set(_SEVERITIES[name])


def test_what_takes_so_many_steps_in_a_row_began_with_the_first_of_them() -> None:
    for condition, level in ((each, level) for each in CONDITIONS for level in each.levels):
        counted = [
            node.left.metric.name
            for node in walk(level.when)
            if isinstance(node, Compare)
            and node.operator == ">="
            and isinstance(node.left, Series)
            and isinstance(node.right, Limit)
            and node.left.metric.unit == node.right.threshold.unit == "{step}"
        ]
        known = level.counts_steps or level.counted is not None
        assert known or not counted, f"{condition.name} {level.severity}: {counted}"
