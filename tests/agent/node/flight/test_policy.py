from mp_agent.node.flight.service import COOL_DOWN_SECONDS, GATHER_SECONDS, FlightPolicy
from mp_agent.records.steps import EndReason
from tests.agent.records.samples import make_event

RUNNING = EndReason.RUNNING


def reason(policy: FlightPolicy, now_seconds: float, end: EndReason = RUNNING, session: str = "a"):
    trigger = policy.due(end, session, now_seconds)
    return trigger and trigger.reason


def test_a_critical_condition_brings_one_record_however_often_it_fires():
    policy = FlightPolicy()
    policy.on_condition(make_event(name="MpAgentX"))
    assert reason(policy, 0.0) == "MpAgentX"
    for seconds in range(1, int(COOL_DOWN_SECONDS)):
        policy.on_condition(make_event(name="MpAgentX"))
        assert reason(policy, seconds) is None
    policy.on_condition(make_event(name="MpAgentX"))
    assert reason(policy, COOL_DOWN_SECONDS) == "MpAgentX"


def test_milder_conditions_and_resolved_ones_bring_none():
    policy = FlightPolicy()
    for severity, state in (("warning", "firing"), ("info", "firing"), ("critical", "resolved")):
        policy.on_condition(make_event(severity=severity, state=state))
    assert reason(policy, 0.0) is None


def test_further_conditions_share_the_next_record():
    policy = FlightPolicy()
    policy.on_condition(make_event(name="MpAgentX"))
    assert reason(policy, 0.0) == "MpAgentX"
    policy.on_condition(make_event(name="MpAgentY"))
    policy.on_condition(make_event(name="MpAgentZ"))
    assert reason(policy, GATHER_SECONDS - 0.1) is None
    assert reason(policy, GATHER_SECONDS) == "MpAgentY"
    assert reason(policy, 10 * GATHER_SECONDS) is None


def test_a_bad_end_brings_one_record_at_once_and_another_attempt_its_own():
    policy = FlightPolicy()
    policy.on_condition(make_event(name="MpAgentX"))
    assert reason(policy, 0.0) == "MpAgentX"
    assert reason(policy, 1.0, EndReason.KILLED) == "killed"
    assert reason(policy, 2.0, EndReason.KILLED) is None
    assert reason(policy, 3.0, EndReason.RUNNING, "b") is None
    assert reason(policy, 4.0, EndReason.FAILED, "b") == "failed"


def test_completion_brings_none():
    assert reason(FlightPolicy(), 0.0, EndReason.COMPLETED) is None


def test_a_record_of_the_end_names_the_condition_that_was_pending():
    policy = FlightPolicy()
    policy.on_condition(make_event(name="MpAgentX"))
    trigger = policy.due(EndReason.FAILED, "a", 0.0)
    assert trigger is not None and trigger.trigger is not None
    assert trigger.reason == "failed"
    assert trigger.trigger.condition.name == "MpAgentX"
