import dataclasses
from typing import Any

import pytest

from mp_agent.alerting.backtesting import Quantity
from mp_agent.alerting.condition import Condition, Level
from mp_agent.alerting.conditions.loss import LOSS_SPIKE
from mp_agent.alerting.expressions import Compare, Number, Series
from mp_agent.alerting.values import Severity, values_in_force
from mp_agent.catalog.metrics import run
from mp_agent.errors import CatalogError
from tests.subtests import each

_LEVEL = Level(
    severity=Severity.WARNING,
    when=Compare(Series(metric=run.LOSS), ">", Number(3)),
    description="Run {run} lost more than <grad_norm_high> in <stall_window>: {value|count}.",
)


def _condition(**changes: Any) -> Condition:
    fields: dict[str, Any] = {
        "name": "MpAgentSomethingWrong",
        "summary": "Something is wrong.",
        "meaning": "It hurts.",
        "confirm": "Look.",
        "remedies": ("Stop.", "Think."),
        "why": "It helps.",
        "levels": (_LEVEL,),
        "quiet": ("good",),
        "needs": ((Quantity.LOSS,),),
        "guidance": LOSS_SPIKE.guidance,
    }
    return Condition(**{**fields, **changes})


def test_annotations_hold_the_numbers_in_force_and_the_runbook_of_the_name() -> None:
    values = values_in_force({"grad_norm_high": 50}, time_scale=0.1)
    bases = ("https://books.example/", "https://boards.example/")
    annotations = dict(_condition().annotations(_LEVEL, values, *bases))
    assert 'condition=\\"MpAgentSomethingWrong\\"' in annotations.pop("step")
    assert "mp_agent_tracker_info{" in annotations.pop("tracker_url")
    assert annotations == {
        "summary": "Something is wrong.",
        "description": 'Run {{ $labels.run }} lost more than 50 in 1m: {{ printf "%.0f" $value }}.',
        "remedy": "Stop. Think.",
        "runbook_url": "https://books.example/mpagentsomethingwrong.md",
        "dashboard_url": "https://boards.example/d/mp-agent-run/"
        "?var-namespace={{ $labels.namespace | urlquery }}"
        "&var-job={{ $labels.job | urlquery }}&var-run={{ $labels.run | urlquery }}"
        "{{ with $labels.cluster }}&var-cluster={{ . | urlquery }}{{ end }}",
    }


@each(
    ("changes", "problem"),
    [
        ({"name": "SomethingWrong"}, "a name is MpAgent"),
        ({"summary": "no full stop"}, "whole sentences"),
        ({"summary": "At {{ $value }}."}, "only descriptions are templates"),
        ({"why": "Below <grad_norm_low>."}, "only descriptions are templates"),
        ({"remedies": ()}, "whole sentences"),
        ({"levels": ()}, "from the worst severity"),
        ({"levels": (_LEVEL, _LEVEL)}, "from the worst severity"),
        (
            {"levels": (_LEVEL, dataclasses.replace(_LEVEL, severity=Severity.CRITICAL))},
            "from the worst severity",
        ),
        (
            {"levels": (dataclasses.replace(_LEVEL, when=Compare(Number(1), ">", Number(0))),)},
            "warning looks at no metric",
        ),
        ({"quiet": ()}, "quiet names at least one case"),
        ({"needs": ()}, "what a log must hold"),
        ({"levels": (dataclasses.replace(_LEVEL, description="<nap>"),)}, "<nap> names no"),
        ({"levels": (dataclasses.replace(_LEVEL, description="{rank}"),)}, "{rank} is no label"),
        ({"levels": (dataclasses.replace(_LEVEL, description="{run"),)}, "belongs to no mark"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CatalogError, match=problem):
        _condition(**changes)
