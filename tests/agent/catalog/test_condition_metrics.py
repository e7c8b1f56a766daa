from mp_agent.catalog.metrics import BY_PROMETHEUS_NAME
from tests.agent.node.builders import make_run_view
from tests.agent.records.samples import make_condition


def test_a_condition_shows_the_earliest_step_of_its_findings_while_it_holds() -> None:
    read = BY_PROMETHEUS_NAME["mp_agent_condition_since_step"].read
    assert read is not None
    assert read(make_run_view(conditions=())) == {}

    found = [("warning", 9), ("warning", 7), ("critical", 0)]
    conditions = tuple(
        make_condition(severity=severity, since_step=step) for severity, step in found
    )
    assert read(make_run_view(conditions=conditions)) == {
        ("MpAgentGradientExplosion", "warning"): 7,
        ("MpAgentGradientExplosion", "critical"): 0,
    }
