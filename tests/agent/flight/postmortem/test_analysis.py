"""What an analysis says beyond its diagnoses."""

import re
from dataclasses import replace

from mp_agent.alerting.conditions import CONDITIONS
from mp_agent.alerting.values import values_in_force
from mp_agent.flight.postmortem.analysis import remedies_for
from mp_agent.flight.postmortem.diagnosis import ALERTING, Causes
from mp_agent.flight.report import verdict
from tests.agent.flight.analyses import analysis_of, exploding
from tests.agent.flight.builders import calm, history_of, layers
from tests.agent.node.builders import merged_step
from tests.agent.records.samples import make_condition
from tests.subtests import each

FIRED = [
    make_condition(name=condition.name, severity=level.severity.value, since_step=50)
    for condition in CONDITIONS
    for level in condition.levels
    if level.severity.value in ALERTING
]
COURSES = {
    "healthy": calm(60),
    "with NaN": [*calm(60), merged_step(61, nan_elements=4.0, loss_nonfinite=1.0)],
    "falling": [merged_step(n, norm=5e-3, loss=100.0 * 0.9**n) for n in range(1, 150)],
    "without a step": [],
}
NAN_LAYER = layers(63, {"weight": {"sum_squares": 4.0}, "b": {"nan_elements": 1.0}})


@each("cause", Causes)
def test_every_cause_has_remedies_in_the_catalog(cause):
    assert remedies_for(cause.value)


@each("tables", [(), (NAN_LAYER,)])
@each("course", COURSES)
def test_no_run_with_an_alert_is_called_normal(course, tables):
    history = history_of(COURSES[course], tables, values_in_force())
    called_normal, unnamed = [], []
    for condition in (replace(one, ended_step=end) for one in FIRED for end in (0, 55)):
        found = analysis_of(conditions=[condition], history=history)
        if not any(condition.name in finding.alerts for finding in found.findings):
            unnamed.append(condition.name)
        if re.search(r"\bnormal\b|Nothing", verdict(found)):
            called_normal.append(condition.name)
    assert not unnamed and not called_normal


def test_what_is_called_normal_is_the_steps_that_were_kept():
    assert "steps 1 to 60" in verdict(analysis_of(*calm(60)))
    assert "no step" in verdict(analysis_of())


@each(("first", "said"), [(1, "since step 1 "), (27, "since step 27 or earlier")])
def test_trouble_on_the_oldest_step_that_was_kept_may_have_begun_before(first, said):
    steps = [merged_step(first + i, loss_nonfinite=1.0) for i in range(8)]
    assert said in verdict(analysis_of(*steps))


def test_trouble_after_a_step_that_was_kept_began_there():
    assert "or earlier" not in verdict(exploding())
