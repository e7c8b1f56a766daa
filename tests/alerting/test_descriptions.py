from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.descriptions import (
    InfoMark,
    parse_description,
    plain_text,
    prometheus_template,
)
from mp_agent.alerting.values import values_in_force
from mp_agent.errors import CatalogError
from tests.alerting.examples.catalog import examples_of
from tests.alerting.promtool import assert_passes
from tests.subtests import each

_VALUES = values_in_force()
_RUN = ("cluster", "namespace", "job", "run")
_LABELS = {"namespace": "ml", "job": "train", "run": "demo", "rank": "3"}
_INFOS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "mp_agent_dead_layer_info": [{"layer": "b"}, {"layer": "a"}],
    "mp_agent_first_nonfinite_info": [
        {"step": "7", "rank": "", "layer": "x.y", "phase": "backward"}
    ],
    "mp_agent_lagging_rank_info": [
        {"rank": "5", "phase": "gone"},
        {"rank": "1", "phase": "forward"},
    ],
}
_FIRST = "{mp_agent_first_nonfinite_info| First seen at |step rank layer phase}"
_TEXTS = [
    ("Run {run} on rank {rank}.", 1.0, "Run demo on rank 3."),
    ("Telemetry{run| of run } is{cluster| in } bad.", 1.0, "Telemetry of run demo is bad."),
    ("{run}: {value|count} of <layer_dead_samples>", 2.6, "demo: 3 of 3"),
    ("{run}: {value|number} in <stall_window>", 0.000123456, "demo: 0.0001235 in 10m"),
    ("{run}: {value|number}", 1e-7, "demo: 1e-07"),
    ("{run}: {value|percent}", 0.0512345, "demo: 5.123%"),
    ("{run}.{mp_agent_dead_layer_info| Among them: |layer}", 1.0, "demo. Among them: a, b."),
    ("{run}." + _FIRST, 1.0, "demo. First seen at step 7, layer x.y, phase backward."),
    (
        "{run}.{mp_agent_lagging_rank_info| Behind: |rank phase}",
        1.0,
        "demo. Behind: rank 1, phase forward; rank 5, phase gone.",
    ),
    ("{run}.{mp_agent_missing_rank_info| Missing: rank |rank}", 1.0, "demo."),
]


@each(("text", "value", "expected"), _TEXTS)
def test_marks_are_filled_in(text: str, value: float, expected: str) -> None:
    parts = parse_description("X", text, (*_RUN, "rank"))
    assert plain_text(parts, _VALUES, _LABELS, value, lambda name: _INFOS.get(name, ())) == expected


def test_prometheus_fills_the_templates_in_just_so(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    rules, checks = [], []
    for index, (text, value, expected) in enumerate(_TEXTS):
        parts = parse_description("X", text, (*_RUN, "rank"))
        rule = {
            "alert": f"A{index}",
            "expr": f"max by (namespace, job, run, rank) (x) * {value!r}",
            "annotations": {"description": prometheus_template(parts, _VALUES)},
        }
        rules.append(rule)
        alert = {"exp_labels": _LABELS, "exp_annotations": {"description": expected}}
        checks.append({"eval_time": "1m", "alertname": f"A{index}", "exp_alerts": [alert]})
    series = [("x", {"rank": "3"}), *((name, row) for name, rows in _INFOS.items() for row in rows)]
    for label in ("run", "cluster"):
        series.append(("mp_agent_dead_layer_info", {"layer": f"of another {label}", label: "x"}))
    inputs = [
        {"series": f"{name}{{{_matchers({**_LABELS, 'rank': '', **labels})}}}", "values": "1x5"}
        for name, labels in series
    ]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    test = {"input_series": inputs, "interval": "1m", "alert_rule_test": checks}
    document = {"rule_files": ["r.yaml"], "tests": [test]}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(document))
    assert_passes(server("promtool"), tmp_path / "t.yaml")


def _matchers(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


@each(
    ("text", "problem"),
    [
        ("{nap}", r"\{nap\} is no label of the alert"),
        ("{rank}", r"\{rank\} is no label"),
        ("{value}", r"\{value\} is no label"),
        ("{value|loud}", r"\{value\|loud\} is no label"),
        ("{mp_agent_nap_info| x |y}", "no info metric with text and labels"),
        ("{mp_agent_step| x |y}", "mp_agent_step is no info metric"),
        ("{mp_agent_dead_layer_info| x |nap}", "is no info metric with labels nap"),
        ("{mp_agent_dead_layer_info| x |}", "is no info metric with labels named"),
        ("run {run", "a brace in .* belongs to no mark"),
        ("run }", "a brace in .* belongs to no mark"),
        ("{{ $labels.run }}", "is no label|belongs to no mark"),
        ("<nap>", "<nap> names no threshold"),
    ],
)
def test_a_description_that_does_not_parse_is_refused_by_its_owner(text: str, problem: str) -> None:
    with pytest.raises(CatalogError, match=f"MpAgentX: .*{problem}|MpAgentX: {problem}"):
        parse_description("MpAgentX", text, _RUN)


def test_what_examples_expect_is_what_the_records_say() -> None:
    """Without the names that series add, each expected description is one of the level's."""
    for condition in CONDITIONS:
        for example in examples_of(condition).firing:
            for severity, text in example.fires.items():
                (level,) = (lv for lv in condition.levels if lv.severity is severity)
                first = next(part for part in level.parts if isinstance(part, str))
                assert text.startswith(_VALUES.fill(first)) or first in text
                infos = [part for part in level.parts if isinstance(part, InfoMark)]
                assert len(infos) <= 2
