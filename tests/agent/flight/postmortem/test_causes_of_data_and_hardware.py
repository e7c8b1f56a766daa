"""Causes in the data, the schedule and the hardware: what shows them, and what does not."""

from dataclasses import replace

from mp_agent.flight.record.evidence import GpuError
from mp_agent.records.merged import Comparison
from mp_agent.records.steps import EndReason, Phase
from tests.agent.flight.builders import calm, findings_of, make_log
from tests.agent.node.builders import merged_step

LOST = GpuError(xid=79, gpu="0000:3b:00", source="The kernel log")


def at_rate(steps, rate):
    return [
        merged_step(s.sequence, **{**s.columns, **s.gradients, "learning_rate": rate})
        for s in steps
    ]


def with_outlier(*, after_loss: float = 2.0, rate_after: float = 1e-3):
    steps = at_rate(calm(60), 1e-3)
    steps += at_rate([merged_step(61, norm=80.0, loss=30.0)], rate_after)
    return steps + at_rate(calm(30, first=62, loss=after_loss), rate_after)


def test_a_batch_whose_loss_and_norm_jump_for_one_step_is_the_cause():
    found = findings_of(with_outlier())["unusual_batch"]
    assert (found.step, found.likelihood, found.arguments_against) == (61, "likely", ())


def test_a_loss_that_stays_where_it_jumped_is_no_batch():
    assert "unusual_batch" not in findings_of(with_outlier(after_loss=30.0))


def test_a_learning_rate_that_rose_at_that_step_speaks_against_the_batch():
    found = findings_of(with_outlier(rate_after=5e-3))["unusual_batch"]
    assert "5 times" in found.arguments_against[0].text
    assert found.likelihood != "likely"


def test_a_loss_spike_without_larger_gradients_is_no_unusual_batch():
    steps = calm(100)
    steps[90] = merged_step(91, norm=1.0, loss=30.0)
    assert findings_of(steps) == {}


def test_a_schedule_that_ended_is_distinguished_from_a_warm_up():
    ended = findings_of([*at_rate(calm(60), 1e-3), *at_rate(calm(200, first=61), 0.0)])
    assert ended["learning_rate_zero"].step == 61
    assert ended["learning_rate_zero"].likelihood == "likely"
    start = findings_of(at_rate(calm(200), 0.0))["learning_rate_zero"]
    assert "warm-up" in start.arguments_against[0].text
    few = [*at_rate(calm(60), 1e-3), *at_rate(calm(3, first=61), 0.0)]
    assert "learning_rate_zero" not in findings_of(few)


def test_zero_gradients_explain_vanishing_ones():
    found = findings_of([*calm(60), *calm(200, first=61, norm=0.0)])
    assert found["zero_gradients"].step == 61
    assert found["gradient_vanishing"].follows == "zero_gradients"


def test_zero_gradients_of_a_loss_of_0_are_no_vanishing_ones():
    zeros = [merged_step(n, norm=0.0, loss=0.0) for n in range(61, 261)]
    found = findings_of([*calm(60), *zeros])
    assert found.keys() == {"zero_gradients"}
    assert found["zero_gradients"].step == 61


def test_a_loss_that_fell_to_0_for_good_is_named_with_its_constant_norm():
    gone = [merged_step(n, norm=1.0, loss=0.0) for n in range(61, 261)]
    assert findings_of([*calm(60), *gone[:100]]) == {}
    found = findings_of([*calm(60), *gone])
    assert found.keys() == {"constant_loss"}
    assert (found["constant_loss"].step, found["constant_loss"].likelihood) == (61, "likely")
    assert any("1 on every step" in one.text for one in found["constant_loss"].arguments_for)


def test_a_loss_that_began_at_0_or_was_0_for_a_few_steps_is_no_cause():
    losses = [0.0, *[1e-4] * 60, *[0.0] * 100]
    steps = [merged_step(n, norm=1.0 + n / 1e3, loss=loss) for n, loss in enumerate(losses, 1)]
    assert findings_of(steps) == {}
    assert findings_of([*calm(60), *[merged_step(61, norm=1.1, loss=0.0)] * 10]) == {}


def test_replicas_that_differ_name_the_rank():
    steps = calm(60)
    apart = {"gradients": Comparison(agree=False, minority_ranks=(3,))}
    steps[40:] = [replace(step, replicas=apart) for step in steps[40:]]
    found = findings_of(steps)["replica_divergence"]
    assert (found.step, found.rank, found.likelihood) == (41, "3", "likely")


def killed():
    state = {"started_sequence": 61}
    return [make_log(0, end=EndReason.KILLED, phase=Phase.FORWARD, state=state)]


def test_a_gpu_that_fell_off_the_bus_explains_a_killed_rank():
    steps = calm(60)
    at = replace(LOST, time_unix_seconds=steps[-1].time_unix_seconds)
    found = findings_of(steps, ranks=killed(), gpu_errors=[at])
    assert next(iter(found)) == "gpu_error"
    assert found["rank_killed"].follows == "gpu_error"


def test_an_error_of_another_day_is_ignored_and_one_without_time_counts_less():
    steps = calm(60)
    old = replace(LOST, time_unix_seconds=steps[0].time_unix_seconds - 86_400)
    assert "gpu_error" not in findings_of(steps, gpu_errors=[old])
    dated = replace(LOST, time_unix_seconds=steps[-1].time_unix_seconds)
    assert (
        findings_of(steps, gpu_errors=[LOST])["gpu_error"].score
        < findings_of(steps, gpu_errors=[dated])["gpu_error"].score
    )


def test_an_error_that_programs_cause_themselves_counts_less():
    steps = calm(60)
    own = replace(LOST, xid=31, time_unix_seconds=steps[-1].time_unix_seconds)
    found = findings_of(steps, gpu_errors=[own])["gpu_error"]
    assert found.likelihood == "unlikely"
