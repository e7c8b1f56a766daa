"""Each part of each condition is there for a reason: without it, some example goes wrong."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.expressions import AtTarget, Joined, Predicate
from mp_agent.alerting.promql import promql
from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force
from mp_agent.errors import CatalogError
from tests.alerting.detector.replay import expected, replay, tracks_of
from tests.alerting.examples.catalog import examples_of
from tests.alerting.promtool import render_tests, unit_test
from tests.subtests import each

_VALUES = values_in_force()
_SUFFIXES = ["".join(letters) for letters in product("abcdefghij", repeat=2)]


def _without_one_part(predicate: Predicate) -> Iterator[tuple[str, Predicate]]:
    """Yield the predicate with one joined part left out, each in turn, and what was left out."""
    if isinstance(predicate, AtTarget):
        for text, changed in _without_one_part(predicate.part):
            yield text, AtTarget(changed)
        return
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


def _variants(condition: Condition) -> Iterator[tuple[str, Condition]]:
    """Yield the condition as it is, then without each of its parts, under names of their own."""
    suffixes = iter(_SUFFIXES)
    yield "", dataclasses.replace(condition, name=condition.name + "X" + next(suffixes))
    for index, level in enumerate(condition.levels):
        for text, weaker in _weakened(level):
            levels = (*condition.levels[:index], weaker, *condition.levels[index + 1 :])
            name = condition.name + "X" + next(suffixes)
            try:
                weak = dataclasses.replace(condition, name=name, levels=levels)
            except CatalogError:
                continue  # the description needs the part
            yield f"{level.severity.value}: {text}", weak


def _tests(condition: Condition, variants: Sequence[Condition]) -> str:
    """Return one test per example that asks for the alerts of all variants."""
    examples = examples_of(condition).all
    alone = tuple(dataclasses.replace(example, also={}) for example in examples)
    whole: dict[str, Any] = {}
    for variant in variants:
        text = render_tests(_VALUES, RULES_FILE, examples=[(variant, alone)], heading="a test")
        document = yaml.safe_load(text.replace("ALERTS{", f'ALERTS{{alertname="{variant.name}",'))
        if not whole:
            whole = document
            for test in whole["tests"]:
                del test["name"]  # it names the first variant
            continue
        for test, more in zip(whole["tests"], document["tests"], strict=True):
            test["alert_rule_test"] += more["alert_rule_test"]
            test["promql_expr_test"] += more["promql_expr_test"]
    return yaml.safe_dump(whole, width=1000)


def _wrong(condition: Condition, variants: Sequence[Condition]) -> set[str]:
    """Return the variants for which an example comes out wrong, as the detectors judge it."""
    found: set[str] = set()
    for example in examples_of(condition).all:
        replayed = replay(tracks_of(example, _VALUES), example.minutes, _VALUES, variants)
        for variant in variants:
            alerts = expected(variant, example, _VALUES)
            fired = [{alert for alert in now if alert.name == variant.name}
                     for now in replayed.firing]  # fmt: skip
            right = (
                {alert.severity for now in fired for alert in now}
                == {alert.severity for alert in alerts}
                and not any(fired[minute] for minute in example.not_yet)
                and (not example.fires or fired[example.at] == alerts)
            )
            if not right:
                found.add(variant.name)
    return found


def _wrong_by_promtool(
    promtool: Path, directory: Path, condition: Condition, variants: Sequence[Condition]
) -> set[str]:
    """Return the variants for which an example comes out wrong, as Prometheus judges it."""
    (directory / RULES_FILE).write_text(render_rules(_VALUES, groups={"one": tuple(variants)}))
    (directory / "tests.yaml").write_text(_tests(condition, variants))
    done = unit_test(promtool, directory / "tests.yaml")
    names = "|".join(variant.name for variant in variants)
    return set(re.findall(rf"\b(?:{names})\b", done.stdout + done.stderr))


@pytest.mark.slow
@each("condition", CONDITIONS)
def test_no_part_of_a_condition_can_be_left_out(
    server: Callable[[str], Path], tmp_path: Path, condition: Condition
) -> None:
    """The detectors judge, which agree with promtool on every example; but not of targets."""
    left_out, (whole, *weaker) = zip(*_variants(condition), strict=True)
    wrong = _wrong(condition, (whole, *weaker))
    unproven = [variant for variant in weaker if variant.name not in wrong]
    if unproven:
        wrong |= _wrong_by_promtool(server("promtool"), tmp_path, condition, (whole, *unproven))
    assert whole.name not in wrong
    missed = [
        text
        for text, variant in zip(left_out[1:], weaker, strict=True)
        if variant.name not in wrong
    ]
    assert not missed, "no example needs: " + "; ".join(missed)
