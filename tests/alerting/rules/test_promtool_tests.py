"""The rules against the examples of the catalog, run by promtool."""

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.alerting.condition import Condition
from mp_agent.alerting.conditions import GROUPS
from mp_agent.alerting.conditions.gradient_size import GRADIENT_EXPLOSION
from mp_agent.alerting.conditions.nonfinite import NONFINITE_UPDATE
from mp_agent.alerting.conditions.run import RUN_FAILED
from mp_agent.alerting.promql import quoted
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import Values, values_in_force
from tests.alerting.examples.catalog import examples_of
from tests.alerting.examples.example import Value
from tests.alerting.promtool import (
    ALL_EXAMPLES,
    Examples,
    assert_passes,
    notation,
    render_tests,
    unit_test,
)

_PROCESSES = 2


def _check(promtool: Path, values: Values, directory: Path, examples: Examples) -> None:
    (directory / RULES_FILE).write_text(render_rules(values))
    tests = render_tests(values, RULES_FILE, examples=examples, heading="of a test")
    (directory / "tests.yaml").write_text(tests)
    _check_rules(promtool, directory / RULES_FILE)
    assert_passes(promtool, directory / "tests.yaml")


def _all_of(condition: Condition) -> Examples:
    return [(condition, examples_of(condition).all)]


def _check_rules(promtool: Path, rules: Path) -> None:
    done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_every_example_fires_what_it_says_and_nothing_else(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    promtool, values = server("promtool"), values_in_force()
    (tmp_path / RULES_FILE).write_text(render_rules(values))
    _check_rules(promtool, tmp_path / RULES_FILE)
    parts = [tmp_path / f"{index}.yaml" for index in range(_PROCESSES)]
    for index, part in enumerate(parts):
        some = [(condition, examples[index::_PROCESSES]) for condition, examples in ALL_EXAMPLES]
        part.write_text(render_tests(values, RULES_FILE, examples=some, heading="of a test"))
    with ThreadPoolExecutor(_PROCESSES) as pool:
        list(pool.map(lambda part: assert_passes(promtool, part), parts))


@pytest.mark.long
@pytest.mark.slow
def test_so_it_does_with_minutes_turned_to_seconds(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    of_groups = [(group[0], examples_of(group[0])) for group in GROUPS.values()]
    some = [(first, (found.firing[0], found.quiet[0])) for first, found in of_groups]
    _check(server("promtool"), values_in_force(time_scale=1 / 60), tmp_path, some)


@pytest.mark.slow
def test_so_it_does_with_other_thresholds_for_the_gradient_norm(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    values = values_in_force({"grad_norm_high": 50, "grad_norm_extreme": 700})
    some = [(GRADIENT_EXPLOSION, examples_of(GRADIENT_EXPLOSION).firing[:3])]
    _check(server("promtool"), values, tmp_path, some)


@pytest.mark.slow
def test_a_run_may_have_any_name(server: Callable[[str], Path], tmp_path: Path) -> None:
    name = 'base line "7B" \\d+ {{x}} .*|$' + 120 * "x"
    conditions = (RUN_FAILED, NONFINITE_UPDATE)
    some = [(each, examples_of(each).firing[:1]) for each in conditions]
    text = render_tests(values_in_force(), RULES_FILE, examples=some, heading="of a test")
    renamed = _renamed(yaml.safe_load(text), name)
    (tmp_path / RULES_FILE).write_text(render_rules(values_in_force()))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(renamed))
    assert_passes(server("promtool"), tmp_path / "tests.yaml")


def _renamed(document: Any, run: str) -> Any:
    if isinstance(document, dict):
        return {key: _renamed(value, run) for key, value in document.items()}
    if isinstance(document, list):
        return [_renamed(value, run) for value in document]
    if not isinstance(document, str):
        return document
    return document.replace('run="demo"', f"run={quoted(run)}").replace("demo", run)


@pytest.mark.slow
def test_an_example_that_expects_another_alert_fails(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without this, a test file that checks nothing would pass as well."""
    values = values_in_force()
    rules = render_rules(values).replace('mp_agent_run_end_info{reason!="completed"}', "absent_")
    (tmp_path / RULES_FILE).write_text(rules)
    tests = render_tests(values, RULES_FILE, examples=_all_of(RUN_FAILED), heading="of a test")
    (tmp_path / "tests.yaml").write_text(tests)
    done = unit_test(server("promtool"), tmp_path / "tests.yaml")
    assert done.returncode == 1
    assert "MpAgentRunFailed fires on an exception" in done.stdout + done.stderr


def test_samples_are_written_as_promtool_reads_them() -> None:
    samples: tuple[Value, ...] = (None, None, 0, 0, 0, 1.5, "stale", None, 1e-7)
    assert notation(samples) == "_x2 0x2 1.5 stale _x1 1e-07"
