from dataclasses import replace

from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from mp_agent.records.conditions import ActiveCondition
from mp_agent.records.merged import RunView
from mp_agent.records.steps import EndReason
from tests.agent.node.builders import make_identity

_CONDITION = ActiveCondition(
    name="MpAgentLossSpike",
    severity="warning",
    run="llama",
    since_step=7,
    since_unix_seconds=0.0,
    value=1.0,
    summary="",
    description="",
    remedy="",
)


def _view(*conditions: ActiveCondition) -> RunView:
    return RunView(
        identity=make_identity(),
        facts={},
        nodes=1,
        active=True,
        end_reason=EndReason.RUNNING,
        phase_name="forward",
        conditions=conditions,
    )


def test_a_condition_shows_the_earliest_step_of_its_findings_while_it_holds() -> None:
    read = BY_PROMETHEUS_NAME["mp_agent_condition_since_step"].read
    assert read is not None
    later, critical = replace(_CONDITION, since_step=9), replace(_CONDITION, severity="critical")
    assert read(_view()) == {}
    assert read(_view(later, _CONDITION, replace(critical, since_step=0))) == {
        ("MpAgentLossSpike", "warning"): 7,
        ("MpAgentLossSpike", "critical"): 0,
    }
