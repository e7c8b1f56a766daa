"""Each part of each condition is there for a reason: without it, some example goes wrong."""

import dataclasses
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.examples import Example
from mp_agent.alerting.predicates import Joined, Predicate
from mp_agent.alerting.promql import promql
from mp_agent.alerting.promtool_tests import render_tests
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force

_VALUES = values_in_force()


def _without_one_part(predicate: Predicate) -> Iterator[tuple[str, Predicate]]:
    """Yield the predicate with one joined part left out, each in turn, and what was left out."""
    if not isinstance(predicate, Joined):
        return
    parts = predicate.parts
    for index, part in enumerate(parts):
        if predicate.operator != "unless" or index > 0:
            rest = parts[:index] + parts[index + 1 :]
            text = f"{predicate.operator} {promql(part, _VALUES)}"
            yield text, rest[0] if len(rest) == 1 else dataclasses.replace(predicate, parts=rest)
        for text, changed in _without_one_part(part):
            changed_parts = (*parts[:index], changed, *parts[index + 1 :])
            yield text, dataclasses.replace(predicate, parts=changed_parts)


def _weakened(level: Level) -> Iterator[tuple[str, Level]]:
    for text, when in _without_one_part(level.when):
        yield text, dataclasses.replace(level, when=when)
    if level.hold:
        yield "for", dataclasses.replace(level, hold=None)
    if level.keep:
        yield "keep_firing_for", dataclasses.replace(level, keep=None)


def _passes(promtool: Path, condition: Condition, directory: Path) -> bool:
    """Run the examples of one condition against its rules alone, the short ones first."""
    rules = render_rules(_VALUES, groups={"one": (condition,)})
    (directory / RULES_FILE).write_text(rules)
    examples = sorted((*condition.firing, *condition.quiet), key=lambda example: example.minutes)
    return all(_holds(promtool, condition, example, directory) for example in examples)


def _holds(promtool: Path, condition: Condition, example: Example, directory: Path) -> bool:
    alone = ((condition, (dataclasses.replace(example, also={}),)),)
    tests = render_tests(_VALUES, RULES_FILE, examples=alone, heading="of a test")
    (directory / "tests.yaml").write_text(tests)
    command = [promtool, "test", "rules", directory / "tests.yaml"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_no_part_of_a_condition_can_be_left_out(
    server: Callable[[str], Path], tmp_path: Path, condition: Condition
) -> None:
    promtool = server("promtool")
    assert _passes(promtool, condition, tmp_path)
    missed = []
    for index, level in enumerate(condition.levels):
        for text, weaker in _weakened(level):
            levels = (*condition.levels[:index], weaker, *condition.levels[index + 1 :])
            if _passes(promtool, dataclasses.replace(condition, levels=levels), tmp_path):
                missed.append(f"{level.severity.value}: {text}")
    assert not missed, "no example needs: " + "; ".join(missed)
