"""The rules in VictoriaMetrics' vmalert, which reads PromQL its own way."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mp_agent.alerting.rules import RULES_FILE, render_rules
from mp_agent.alerting.values import values_in_force

_RENDERED = Path(__file__).parents[3] / "alerting" / "rendered" / RULES_FILE


def _dry_run(vmalert: Path, rules: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [vmalert, "-dryRun", f"-rule={rules}"], capture_output=True, text=True, timeout=30
    )


def test_it_takes_the_committed_rules(server: Callable[[str], Path]) -> None:
    done = _dry_run(server("vmalert"), _RENDERED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_takes_the_rules_of_a_site(server: Callable[[str], Path], tmp_path: Path) -> None:
    values = values_in_force({"grad_norm_high": 12.5}, {"end_window": 90}, time_scale=1 / 60)
    rules = tmp_path / "rules.yaml"
    rules.write_text(render_rules(values))
    done = _dry_run(server("vmalert"), rules)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"), [("by (cluster,", "by (cluster,,"), ("{{ $labels.", "{{ $lables.")]
)
def test_it_would_refuse_rules_that_are_wrong(
    server: Callable[[str], Path], tmp_path: Path, right: str, wrong: str
) -> None:
    """Without this, a dry run that checks nothing would pass as well."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(_RENDERED.read_text().replace(right, wrong, 1))
    assert _dry_run(server("vmalert"), rules).returncode != 0
