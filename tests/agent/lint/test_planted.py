"""Each mistake is found in variants that were written before the rules, and nowhere else."""

from collections import Counter
from pathlib import Path

import pytest

from mp_agent.lint.rules import RULES
from mp_agent.lint.runner import check_paths
from tests.agent.lint.planted_code import planted

PLANTED = planted()


def test_a_rule_reports_the_marked_lines_alone(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for number, case in enumerate(PLANTED):
        with subtests.test(str(case)):
            directory = tmp_path / str(number)
            directory.mkdir()
            for name, text in case.files.items():
                (directory / name).write_text(text, encoding="utf-8")
            report = check_paths(directory, select=[case.code])
            assert not report.skipped
            found = {(Path(one.path).name, one.span.line) for one in report.findings}
            assert found == case.expected


def test_every_rule_has_five_variants_and_two_clean_counterparts() -> None:
    variants = Counter(case.code for case in PLANTED if not case.clean)
    clean = Counter(case.code for case in PLANTED if case.clean)
    for rule in RULES:
        assert variants[rule.code] >= 5 and clean[rule.code] >= 2, rule.code
    assert all(bool(case.expected) is not case.clean for case in PLANTED)
