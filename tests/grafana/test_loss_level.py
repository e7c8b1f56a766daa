"""The Fleet board holds each run's loss against that run's own, by a real Prometheus engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from grafana.boards.fleet import FLEET
from grafana.queries import RUN
from tests.alerting.promtool import assert_passes

_USUAL, _ABOVE, _LOST = 0, 1, 2


def _series(name: str, run: str, value: float) -> dict[str, str]:
    labels = f'cluster="c",namespace="n",job="j",run="{run}",instance="a:9464"'
    return {"series": f"{name}{{{labels}}}", "values": f"{value}x4"}


@pytest.mark.parametrize(
    ("loss", "lost_steps", "expected"),
    [(2.0, 0, _USUAL), (2.7, 0, _ABOVE), (300.0, 40, _LOST), (2.0, 40, _LOST), (-5.0, 0, _USUAL)],
)
def test_a_loss_has_the_level_of_its_own_run(
    server: Callable[[str], Path], tmp_path: Path, loss: float, lost_steps: int, expected: int
) -> None:
    (panel,) = (panel for panel in FLEET.panels if panel.id == 10)
    column = next(column for column in panel.columns if column.title == "Loss level")
    expression = panel.queries[ord(column.name[-1]) - ord("A")].expression
    for label in RUN:
        expression = expression.replace(f"${label}", ".+")
    values = {
        "mp_agent_loss": loss,
        "mp_agent_loss_spike_bound": 2.5,
        "mp_agent_loss_lost_steps": lost_steps,
    }
    young = [_series("mp_agent_loss", "young", 9.0), _series("mp_agent_run_active", "young", 1)]
    test = {
        "interval": "15s",
        "input_series": [*young, *(_series(name, "r", value) for name, value in values.items())],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": "1m",
                "exp_samples": [
                    {"labels": '{cluster="c",namespace="n",job="j",run="r"}', "value": expected}
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    assert_passes(server("promtool"), file)
    assert set(column.texts) == {str(level) for level in (_USUAL, _ABOVE, _LOST)}
