"""The JSON behind the status page says what the views say, and never a number JSON lacks."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mp_agent.exporters.status_page.report import (
    FORMAT,
    LAYERS_AT_MOST,
    STEPS_KEPT,
    StepHistory,
    snapshot_report,
    verdict,
)
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.health import LatestValues
from mp_agent.records.steps import EndReason
from mp_agent.records.views import FirstNonfinite, TrackerLink
from tests.agent.node.builders import merged_step
from tests.agent.node.series.test_snapshot_builder import export
from tests.subtests import each

CONDITION = ActiveCondition(
    name="MpAgentGradientExplosion",
    severity="critical",
    run="llama",
    since_step=7,
    since_unix_seconds=100.0,
    value=2000.0,
    summary="The gradients explode.",
    description="The norm was 2000.",
    remedy="Clip.",
    layer="<script>alert(1)</script>",
)


TRACKER = TrackerLink(
    tracker="wandb", name="<b>llama</b> (mp_agent)", url="https://wandb.example/team/runs/1a2b"
)


def with_view(**changes: Any) -> Any:
    whole = export()
    assert whole.view is not None
    return replace(whole, view=replace(whole.view, **changes))


def report(source: Any) -> dict[str, Any]:
    (run,) = snapshot_report([source], {"grad_norm_high": 100.0}, 12.0)["runs"]
    return dict(run)


def test_the_report_names_format_time_and_thresholds() -> None:
    whole = snapshot_report([export()], {"grad_norm_high": 100.0}, 12.0)
    assert whole["format"] == FORMAT
    assert whole["time_unix_seconds"] == 12.0
    assert whole["thresholds"] == {"grad_norm_high": 100.0}


def test_a_run_is_reported_with_its_numbers_layers_ranks_and_agent() -> None:
    run = report(export())
    assert run["run"] == "llama"
    assert run["is_root"] is True
    assert run["summary"]["step"] == 1
    assert run["summary"]["grad_norm"] == 2.0
    assert run["summary"]["end_reason"] is None
    assert [layer["layer"] for layer in run["layers"]] == ["w"]
    assert run["layers"][0]["grad_norm"] == 1.0
    assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
    assert run["agent"]["version"] == "0.1.0"


def test_a_run_is_reported_with_where_its_trackers_show_it() -> None:
    assert report(export())["summary"]["trackers"] == []
    shown = report(with_view(trackers=(TRACKER,)))["summary"]["trackers"]
    assert shown == [{"tracker": "wandb", "name": TRACKER.name, "url": TRACKER.url}]


def stretched(every: float = 1.0) -> Any:
    """Return a run whose layers are measured a quarter as often as was set."""
    step = merged_step(900, layer_interval_steps=400.0, measuring_interval_steps=every)
    whole = with_view(latest=LatestValues(step=step, layer_interval_shortest_steps=100))
    shares: tuple[dict[str, float], ...] = (
        {"host_overhead_ratio": 0.004, "device_overhead_ratio": 0.009},
        {},
    )
    pairs = zip(whole.ranks, shares, strict=True)
    return replace(whole, ranks=[replace(rank, values=values) for rank, values in pairs])


def test_intervals_are_reported_with_the_one_that_was_set() -> None:
    summary = report(stretched())["summary"]
    names = ("layer_interval_steps", "layer_interval_shortest_steps", "measuring_interval_steps")
    assert [summary[name] for name in names] == [400, 100, 1]
    assert [report(export())["summary"][name] for name in names] == [None] * 3


def test_the_probe_s_share_of_a_rank_is_where_it_takes_most_and_unknown_at_first() -> None:
    assert [rank["overhead_ratio"] for rank in report(stretched())["ranks"]] == [0.009, None]


def test_a_layer_whose_norm_does_not_count_shows_none() -> None:
    whole = export()
    unjudged = [replace(layer, judged=False) for layer in whole.layers]
    (layer,) = report(replace(whole, layers=unjudged))["layers"]
    assert layer["grad_norm"] is None
    assert layer["grad_abs_max"] is None
    assert layer["zero_ratio"] is None


def test_a_layer_without_elements_has_no_zero_ratio() -> None:
    whole = export()
    empty = [replace(la, values={**la.values, "elements": 0.0}) for la in whole.layers]
    (layer,) = report(replace(whole, layers=empty))["layers"]
    assert layer["zero_ratio"] is None


def test_of_too_many_layers_the_worst_are_listed_in_their_own_order() -> None:
    whole = export()
    (layer,) = whole.layers
    many = [
        replace(layer, name=f"l{n}", values={**layer.values, "sum_squares": float(n)})
        for n in range(LAYERS_AT_MOST + 5)
    ]
    many[0] = replace(many[0], values={**many[0].values, "nan_elements": 1.0})
    run = report(replace(whole, layers=many))
    assert run["layers_omitted"] == 5
    assert len(run["layers"]) == LAYERS_AT_MOST
    assert [la["layer"] for la in run["layers"][:2]] == ["l0", "l6"]


def test_lag_is_counted_from_the_foremost_rank_and_unknown_before_a_first_step() -> None:
    whole = export()
    steps = (10, 7, None)
    ranks = [replace(whole.ranks[0], step=step) for step in steps]
    assert [rank["lag"] for rank in report(replace(whole, ranks=ranks))["ranks"]] == [0, 3, None]


def test_a_node_without_rank_0_reports_its_ranks_and_points_to_the_root() -> None:
    run = report(replace(export(), view=None, node_rank=3))
    assert run["is_root"] is False
    assert run["summary"] is None
    assert run["conditions"] == []
    assert run["ranks"]
    assert "Node 3" in run["verdict"] and "root" in run["verdict"]


THREE_OF_FOUR = replace(merged_step(1), world_size=4, present_ranks=frozenset((0, 1, 2)))


@each(
    ("changes", "sentence"),
    [
        ({}, "Training: step 1; no condition in force."),
        ({"phase_name": "eval"}, "Evaluating: step 1; no condition in force."),
        ({"latest": LatestValues()}, "Starting: no step yet; no condition in force."),
        (
            {"latest": LatestValues(step=THREE_OF_FOUR)},
            "Training: step 1; the numbers cover 75% of the ranks.",
        ),
        (
            {"active": False, "end_reason": EndReason.COMPLETED},
            "Ended: completed at step 1.",
        ),
        ({"active": False, "end_reason": EndReason.KILLED}, "Ended: killed at step 1."),
        (
            {"conditions": (CONDITION,)},
            "Training: step 1; critical: the gradients explode (MpAgentGradientExplosion).",
        ),
        (
            {"conditions": (replace(CONDITION, severity="info", name="MpAgentA"), CONDITION)},
            "Training: step 1; critical: the gradients explode (MpAgentGradientExplosion), "
            "and 1 more condition.",
        ),
        (
            {"conditions": (replace(CONDITION, summary="FP16 ends."),)},
            "Training: step 1; critical: FP16 ends (MpAgentGradientExplosion).",
        ),
    ],
)
def test_the_verdict_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert verdict(with_view(**changes)) == sentence


def test_conditions_stand_worst_first_with_their_remedy() -> None:
    mild = replace(CONDITION, name="MpAgentA", severity="warning")
    run = report(with_view(conditions=(mild, CONDITION)))
    assert [condition["severity"] for condition in run["conditions"]] == ["critical", "warning"]
    assert run["conditions"][0]["remedy"] == "Clip."
    assert run["conditions"][0]["since_step"] == 7


def test_the_first_nonfinite_value_is_reported_as_far_as_it_is_known() -> None:
    first = FirstNonfinite(step=9, rank="1", layer="", phase="forward")
    reported = report(with_view(first_nonfinite=first))["summary"]["first_nonfinite"]
    assert reported == {"step": 9, "rank": "1", "layer": "", "phase": "forward"}


def test_the_report_is_strict_json() -> None:
    text = json.dumps(
        snapshot_report([with_view(conditions=(CONDITION,))], {}, 1.0), allow_nan=False
    )
    assert json.loads(text)["runs"]


def keys_of(value: Any) -> set[str]:
    """Return the names of all fields of a JSON value, but for those of `thresholds` and `facts`."""
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item)}
    if not isinstance(value, dict):
        return set()
    inside = (item for key, item in value.items() if key not in ("thresholds", "facts"))
    return {*value, *(key for item in inside for key in keys_of(item))}


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
    first = FirstNonfinite(step=9, rank="1", layer="", phase="forward")
    whole = snapshot_report([with_view(conditions=(CONDITION,), first_nonfinite=first)], {}, 1.0)
    assert {key for key in keys_of(whole) if not re.search(rf'[`."]{key}\b', page)} == set()


def test_the_history_keeps_the_last_thousand_steps_oldest_first() -> None:
    history = StepHistory()
    for number in range(1, STEPS_KEPT + 11):
        history.add(merged_step(number, norm=float(number)))
    columns = history.columns()
    assert columns["step"] == list(range(11, STEPS_KEPT + 11))
    assert columns["grad_norm"][-1] == pytest.approx(STEPS_KEPT + 10)
    assert {len(column) for column in columns.values()} == {STEPS_KEPT}


def test_the_history_shows_no_norm_of_a_skipped_step() -> None:
    history = StepHistory()
    history.add(merged_step(1, norm=3.0, skipped=1.0))
    assert history.columns()["grad_norm"] == [None]
    assert history.columns()["skipped"] == [True]


def test_the_history_gives_only_what_is_new_and_nothing_after_it_was_cleared() -> None:
    history = StepHistory()
    for number in (1, 2, 3):
        history.add(merged_step(number, norm=1.0))
    assert history.columns(after_step=2)["step"] == [3]
    history.clear()
    assert history.columns()["step"] == []


def broken() -> Any:
    """Return a run 264 steps after its loss and gradients became NaN."""
    whole = with_view(
        latest=LatestValues(
            step=merged_step(848, loss_nonfinite=1.0, nan_elements=1_408.0),
            judged=merged_step(583, norm=2.0, elements=4.0, zero_elements=1.0, abs_max=1.0),
            loss=0.0732,
            value_steps={"loss": 583},
            nonfinite_since={"loss": 584, "gradients": 584},
        ),
        first_nonfinite=FirstNonfinite(step=584, rank="", layer="b", phase="backward"),
    )
    (layer,) = whole.layers
    now = replace(layer, step=840, judged=False, values={**layer.values, "nan_elements": 704.0})
    layers = [replace(layer, name=name, step=580, later=now) for name in ("a", "b")]
    return replace(whole, layers=layers)


def healed(run: Any) -> Any:
    """Return a run whose last values are finite."""
    latest = replace(run.view.latest, nonfinite_since={})
    return replace(run, view=replace(run.view, latest=latest))


def test_a_value_from_before_a_nan_has_its_step_and_since_when_there_is_none() -> None:
    summary = report(broken())["summary"]
    assert (summary["loss"], summary["loss_step"]) == (0.0732, 583)
    assert (summary["grad_norm"], summary["grad_norm_step"]) == (2.0, 583)
    assert summary["clip_coefficient_step"] == summary["grad_abs_max_step"] == 583
    assert summary["loss_nonfinite_since_step"] == 584
    assert summary["gradients_nonfinite_since_step"] == 584


def test_layers_have_the_counts_of_the_latest_sample_and_the_step_of_their_norm() -> None:
    rows = report(broken())["layers"]
    assert sum(row["nonfinite_elements"] for row in rows) == 1_408
    assert {(row["step"], row["grad_norm_step"]) for row in rows} == {(840, 580)}


def test_the_layer_with_the_first_nan_comes_first_while_there_are_any() -> None:
    assert [row["layer"] for row in report(broken())["layers"]] == ["b", "a"]
    assert [row["layer"] for row in report(healed(broken()))["layers"]] == ["a", "b"]


def test_a_curve_ends_where_the_values_are_not_finite() -> None:
    kept = StepHistory()
    kept.add(merged_step(1, loss=2.0, nan_elements=0.0))
    kept.add(merged_step(2, loss=3.0, loss_nonfinite=1.0, nan_elements=1.0))
    columns = kept.columns()
    assert (columns["loss"], columns["loss_nonfinite"]) == ([2.0, None], [False, True])
    assert columns["grad_norm"][1] is None
    assert columns["gradients_nonfinite"] == [False, True]
