from collections.abc import Callable
from pathlib import Path

import pytest

from mp_agent.alerting.durations import duration
from mp_agent.alerting.expressions import (
    Compare,
    Count,
    Either,
    Expression,
    Gone,
    Length,
    Number,
    Predicate,
    Recorded,
    Seen,
    Series,
    Signal,
    Silent,
    Where,
    all_of,
    any_of,
    limit,
    unless,
    walk,
)
from mp_agent.alerting.promql import number_text, promql, quoted
from mp_agent.alerting.values import values_in_force
from mp_agent.catalog.metrics import agent, gradients, run, training
from mp_agent.errors import CatalogError
from tests.alerting.promtool import assert_passes
from tests.subtests import each

_BY = "by (cluster, namespace, job, run)"
_STEP = Series(metric=run.STEP)
_LOSS = Series(metric=run.LOSS, aggregate="min")


def _text(expression: Expression) -> str:
    """Return the PromQL on one line, with aggregations of the two series shortened."""
    text = " ".join(promql(expression, values_in_force()).split())
    text = text.replace("( ", "(").replace(" )", ")")
    return text.replace(f"max {_BY} (last_over_time(mp_agent_step[3m]))", "S").replace(
        f"min {_BY} (last_over_time(mp_agent_loss[3m]))", "L"
    )


def _above(signal: Signal, value: float) -> Predicate:
    return Compare(signal, ">", Number(value))


def test_a_series_says_function_range_offset_matchers_and_kept_labels() -> None:
    series = Series(
        metric=run.LOSS,
        over=("max_over_time", duration("stall_window")),
        before=(duration("stall_window"), duration("end_window")),
        where=(Where("a", "!=", "b"),),
        keep=("reason",),
    )
    assert _text(series) == (
        "max by (cluster, namespace, job, run, reason) "
        '(max_over_time(mp_agent_loss{a!="b"}[10m] offset 15m))'
    )


def test_a_threshold_as_label_is_the_level_whatever_its_number() -> None:
    matcher = Where("bound", "=", limit("grad_norm_vanished"))
    assert 'bound="vanished"' in _text(
        Series(metric=gradients.GRAD_NORM_EXCEEDED, where=(matcher,))
    )


def test_a_count_prefers_what_happened_since_a_young_agents_counter_began() -> None:
    count = Count(metric=training.SKIPPED_STEPS, window=duration("stall_window"))
    assert _text(count) == (
        f"max {_BY} ((last_over_time(mp_agent_skipped_steps_total[10m]) and on (cluster, "
        "namespace, job, run, instance) (last_over_time(mp_agent_counting_seconds[3m]) < 600) "
        "unless last_over_time(mp_agent_skipped_steps_total[3m] offset 10m)) or "
        "increase(mp_agent_skipped_steps_total[10m]))"
    )


def test_a_count_of_several_series_adds_up_what_the_scraper_did_not_double() -> None:
    count = Count(metric=agent.PROBE_ERRORS, window=duration("stall_window"))
    text = _text(count)
    assert text.startswith(f"sum {_BY} (max by (cluster, namespace, job, run, node_rank) (")


@each(
    ("expression", "text"),
    [
        (_above(_STEP - _LOSS, 3), "S - L > 3"),
        (_above(_STEP * (_STEP - _LOSS), 3), "S * (S - L) > 3"),
        (_above((_STEP - _LOSS) - (_STEP - _LOSS), 3), "(S - L) - (S - L) > 3"),
        (_above(_STEP + limit("stall_steps") * _LOSS, 3), "S + 10 * L > 3"),
        (_above(Either(_STEP, _LOSS), 3), "(S or L) > 3"),
        (_above(_STEP / _LOSS, 3), "S / (L != 0) > 3"),
        (_above(_STEP / limit("stall_steps"), 3), "S / 10 > 3"),
        (_above(Recorded("run:mp_agent_x:y", _STEP), 3), "run:mp_agent_x:y > 3"),
        (all_of(_above(_STEP, 1), _above(_LOSS, 2)), "S > 1 and L > 2"),
        (
            unless(all_of(_above(_STEP, 1), _above(_LOSS, 2)), _above(_LOSS, 3)),
            "S > 1 and L > 2 unless L > 3",
        ),
        (
            all_of(_above(_STEP, 1), unless(_above(_LOSS, 2), _above(_LOSS, 3))),
            "S > 1 and (L > 2 unless L > 3)",
        ),
        (
            all_of(any_of(_above(_STEP, 1), _above(_STEP, 2)), _above(_LOSS, 3)),
            "(S > 1 or S > 2) and L > 3",
        ),
        (any_of(_above(_STEP, 1), all_of(Seen(_STEP), Seen(_LOSS))), "S > 1 or S and L"),
        (Compare(_STEP, ">", Length(duration("stall_window"))), "S > 600"),
    ],
)
def test_parentheses_stand_where_promql_needs_them(expression: Predicate, text: str) -> None:
    assert _text(expression) == text


def test_parts_with_other_labels_are_matched_by_run() -> None:
    kept = Series(metric=run.RUN_END, keep=("reason",))
    assert "unless on (cluster, namespace, job, run) S" in _text(unless(Seen(kept), Seen(_STEP)))


def test_every_node_of_an_expression_is_walked() -> None:
    expression = unless(_above(Recorded("run:mp_agent_x:y", _LOSS / _STEP), 1), Seen(_LOSS))
    assert {type(node).__name__ for node in walk(expression)} == {
        "Joined", "Compare", "Recorded", "Arithmetic", "Series", "Number", "Seen"
    }  # fmt: skip


@pytest.mark.parametrize(("value", "text"), [(100.0, "100"), (1e-6, "1e-06"), (0.159, "0.159")])
def test_numbers_are_exact(value: float, text: str) -> None:
    assert number_text(value) == text


def test_label_values_are_escaped() -> None:
    assert quoted('a"b\\c\nd') == '"a\\"b\\\\c\\nd"'


def test_targets_without_series_are_counted_per_job() -> None:
    assert _text(Silent(agent.BUILD, duration("stall_window"))) == (
        'count by (cluster, namespace, job) (up{job=~".*mp-agent.*"} and '
        'up{job=~".*mp-agent.*"} offset 10m unless on (cluster, namespace, job, instance) '
        "present_over_time(mp_agent_build_info[10m]))"
    )


def test_a_selector_is_added_to_every_series_of_ours() -> None:
    values = values_in_force(selectors={"series": 'cluster="a"'})
    gone = promql(Gone(run.RUN_ACTIVE, duration("stall_window")), values)
    assert 'mp_agent_run_active{cluster="a"}[10m]' in gone
    where = (Where("bound", "=", limit("grad_norm_high")),)
    count = promql(Series(metric=gradients.GRAD_NORM_EXCEEDED, where=where), values)
    assert '{bound="high",optimizer="",cluster="a"}' in count


@pytest.mark.parametrize(
    ("signal", "matchers"),
    [
        (Series(metric=gradients.GRAD_NORM), '{optimizer=""}[3m]'),
        (Series(metric=gradients.GRAD_NORM, keep=("optimizer",)), "[3m]"),
        (
            Series(metric=gradients.GRAD_NORM, where=(Where("optimizer", "=~", "2|3"),)),
            '{optimizer=~"2|3"}[3m]',
        ),
        (Series(metric=run.LOSS), "[3m]"),
        (
            Count(metric=gradients.GRAD_NORM_EXCEEDED, window=duration("stall_window")),
            '{optimizer=""}[10m]',
        ),
    ],
)
def test_series_of_further_optimizers_are_left_alone_unless_they_are_named(
    signal: Series | Count, matchers: str
) -> None:
    assert f"({signal.metric.prometheus_name}{matchers}" in _text(signal)


@pytest.mark.parametrize("name", ["mp_agent_x", "run:x:y", "run:mp_agent_x", "Run:mp_agent_x:y"])
def test_a_recorded_signal_has_a_name_of_three_parts(name: str) -> None:
    with pytest.raises(CatalogError, match=name):
        Recorded(name, _STEP)


def test_an_unknown_threshold_fails_where_it_is_named() -> None:
    with pytest.raises(CatalogError, match="'nap'"):
        limit("nap")


def test_prometheus_parses_parentheses_as_the_tree_has_them(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without the parentheses, the step alone would make this fire."""
    rules = tmp_path / "r.yaml"
    expression = all_of(any_of(_above(_STEP, 1), _above(_LOSS, 1)), _above(_LOSS, 1))
    body = promql(expression, values_in_force()).replace("\n", " ")
    rules.write_text(f"groups: [{{name: g, rules: [{{alert: A, expr: '{body}'}}]}}]\n")
    tests = tmp_path / "t.yaml"
    tests.write_text(
        "rule_files: [r.yaml]\ntests:\n- interval: 1m\n  input_series:\n"
        "  - {series: 'mp_agent_step{run=\"a\"}', values: '5'}\n"
        "  - {series: 'mp_agent_loss{run=\"a\"}', values: '0'}\n"
        "  alert_rule_test: [{eval_time: 0m, alertname: A}]\n"
    )
    assert_passes(server("promtool"), tests)
