"""The Fleet board begins with the runs that need a person, by a real Prometheus engine."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from grafana.boards.fleet import FLEET
from grafana.queries import RUN
from tests.alerting.promtool import assert_passes

_ENDED, _HEALTHY, _INFO, _SILENT, _WARNING, _CRITICAL = range(-1, 5)

_RUNS: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "healthy": (_HEALTHY, {}),
    "ended": (_ENDED, {"mp_agent_run_active": "1x39 0x40", "mp_agent_step": "0+1x39 39x40"}),
    "info": (_INFO, {'mp_agent_condition_active{severity="info"}': "1x80"}),
    "standing": (_SILENT, {"mp_agent_step": "7x80"}),
    "vanished": (
        _SILENT,
        {"mp_agent_run_active": "1x39 _x40", "mp_agent_step": "0+1x39 _x40"},
    ),
    "standing, with info": (
        _SILENT,
        {"mp_agent_step": "7x80", 'mp_agent_condition_active{severity="info"}': "1x80"},
    ),
    "warning": (_WARNING, {'mp_agent_condition_active{severity="warning"}': "1x80"}),
    "alert": (
        _WARNING,
        {'ALERTS{alertname="MpAgentLossSpike",alertstate="firing",severity="warning"}': "1x80"},
    ),
    "pending": (
        _HEALTHY,
        {'ALERTS{alertname="MpAgentLossSpike",alertstate="pending",severity="critical"}': "1x80"},
    ),
    "over": (_HEALTHY, {'mp_agent_condition_active{severity="critical"}': "1x39 0x40"}),
    "critical": (
        _CRITICAL,
        {
            'mp_agent_condition_active{severity="critical"}': "1x80",
            'mp_agent_condition_active{severity="warning"}': "1x80",
            "mp_agent_step": "7x80",
        },
    ),
    "failed": (
        _CRITICAL,
        {
            "mp_agent_run_active": "0x80",
            'ALERTS{alertname="MpAgentRunFailed",alertstate="firing",severity="critical"}': "1x80",
        },
    ),
}
_HEALTHY_SERIES = {"mp_agent_run_active": "1x80", "mp_agent_step": "0+1x80"}


def _series(run: str, own: Mapping[str, str]) -> list[dict[str, str]]:
    labels = f'cluster="c",namespace="n",job="j",run="{run}"'
    found = []
    for name, values in {**_HEALTHY_SERIES, **own}.items():
        family, _, rest = name.removesuffix("}").partition("{")
        more = f",{rest}" if rest else ""
        found.append({"series": f"{family}{{{labels}{more}}}", "values": values})
    return found


@pytest.mark.e2e
def test_runs_have_the_urgency_that_the_table_sorts_by(
    server: Callable[[str], Path], tmp_path: Path
) -> None:
    (panel,) = (panel for panel in FLEET.panels if panel.id == 10)
    column = next(column for column in panel.columns if column.title == panel.sort_by[0])
    expression = panel.queries[ord(column.name[-1]) - ord("A")].expression
    for label in RUN:
        expression = expression.replace(f"${label}", ".+")
    test = {
        "interval": "30s",
        "input_series": [one for run, (_, own) in _RUNS.items() for one in _series(run, own)],
        "promql_expr_test": [
            {
                "expr": expression.replace("$__range", "1h"),
                "eval_time": "40m",
                "exp_samples": [
                    {
                        "labels": f'{{cluster="c",namespace="n",job="j",run="{run}"}}',
                        "value": urgency,
                    }
                    for run, (urgency, _) in _RUNS.items()
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    assert_passes(server("promtool"), file)
    assert set(column.texts) == {str(level) for level in range(_ENDED, _CRITICAL + 1)}
