"""The records of the rules hold what they say: examples, alerts, texts."""

from pathlib import Path

import pytest

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.lint.rules import RULES
from mp_agent.lint.runner import check_paths

BY_CODE = [pytest.param(rule, id=rule.code) for rule in RULES]


def test_the_bad_example_breaks_the_rule_and_the_good_one_none(tmp_path: Path) -> None:
    for rule in RULES:
        bad, good = tmp_path / f"{rule.code}_bad.py", tmp_path / f"{rule.code}_good.py"
        bad.write_text(rule.bad, encoding="utf-8")
        good.write_text(rule.good, encoding="utf-8")
        assert rule.code in check_paths(bad).counts(), rule.code
        assert check_paths(good).counts() == {}, rule.code


def test_every_alert_exists_and_every_missing_one_is_explained() -> None:
    names = {condition.name for condition in CONDITIONS}
    for rule in RULES:
        assert (rule.alert in names) if rule.alert else rule.no_alert, rule.code


def test_codes_are_consecutive_and_names_are_distinct() -> None:
    for first in (101, 201):
        own = [rule.code for rule in RULES if rule.code[2] == str(first)[0]]
        assert own == [f"MP{first + index}" for index in range(len(own))]
    assert len({rule.name for rule in RULES}) == len(RULES)
