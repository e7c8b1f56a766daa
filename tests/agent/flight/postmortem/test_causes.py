"""What the numbers say, and above all what they do not say."""

from dataclasses import replace

import pytest

from mp_agent.flight.postmortem.analysis import remedies_for
from mp_agent.records.steps import EndReason, Phase
from tests.agent.flight.builders import calm, findings_of, layers, make_log, overflow
from tests.agent.node.builders import merged_step
from tests.agent.records.samples import make_condition


def growing(first: int, count: int, **values: float):
    return [
        merged_step(first + i, norm=50.0 * 2.0**i, loss=2.0 + 3.0 * i, **values)
        for i in range(count)
    ]


def test_a_healthy_fp16_run_is_accused_of_nothing():
    steps = calm(200, loss_scale=65536.0, skipped=0.0)
    # GradScaler's own overflow, once in 2000 steps, and the steps after it at half the scale.
    steps[90] = overflow(91, 65536.0)
    steps[91:] = calm(109, first=92, loss_scale=32768.0, skipped=0.0)
    assert findings_of(steps) == {}


def test_calibration_is_no_collapse():
    steps = [overflow(n + 1, 2.0 ** (36 - n)) for n in range(20)]
    steps += calm(60, first=21, loss_scale=65536.0)
    assert findings_of(steps) == {}


def test_an_explosion_is_found_at_the_first_step_above_the_limit():
    finding = findings_of([*calm(60), *growing(61, 8)])["gradient_explosion"]
    # 50, 100, 200: the second is at the limit, not above it.
    assert (finding.step, finding.phase, finding.likelihood) == (63, "backward", "likely")


def test_the_layer_of_an_explosion_is_that_of_its_first_step():
    table = layers(63, {"small": {"sum_squares": 1.0}, "large": {"sum_squares": 99.0}})
    finding = findings_of([*calm(60), *growing(61, 8)], [table])["gradient_explosion"]
    assert finding.layer == "large"
    assert any("99%" in argument.text for argument in finding.arguments_for)


def test_spikes_that_clipping_handles_are_said_to_be_contained():
    steps = calm(100, clip_max_norm=1.0, clip_norm=1.0)
    for place in (40, 41, 80):
        steps[place] = merged_step(
            place + 1, norm=5000.0, loss=2.0, clip_max_norm=1.0, clip_norm=5000.0
        )
    found = findings_of(steps)
    assert found.keys() == {"contained_explosion"}
    assert (found["contained_explosion"].step, found["contained_explosion"].score > 0) == (41, True)


def test_clipped_steps_are_accused_where_the_loss_soars_nevertheless():
    clipped = growing(61, 12, clip_max_norm=1.0, clip_norm=1e4)
    finding = findings_of([*calm(60), *clipped])["gradient_explosion"]
    assert finding.step == 63
    assert finding.arguments_against[0].text == "All of these steps were clipped to 1."


def test_large_norms_of_the_first_steps_are_accused_of_nothing():
    steps = [merged_step(n, norm=400.0 / n, loss=9.0) for n in range(1, 8)]
    assert findings_of([*steps, *calm(60, first=8)]) == {}


def test_a_nan_after_an_explosion_follows_from_it():
    lost = [merged_step(n, nan_elements=4.0, loss_nonfinite=1.0) for n in (69, 70)]
    found = findings_of([*calm(60), *growing(61, 8), *lost])
    assert next(iter(found)) == "gradient_explosion"
    assert found["nonfinite_forward"].follows == "gradient_explosion"
    assert found["nonfinite_update"].follows == "gradient_explosion"


def test_a_nan_born_in_the_backward_of_one_rank_names_it_as_far_as_that_was_measured():
    lost = merged_step(61, nan_elements=4.0, loss_nonfinite=0.0)
    of_two = replace(lost, world_size=2, present_ranks=frozenset({0, 1}))
    finding = findings_of([*calm(60), of_two])["nonfinite_backward"]
    assert (finding.rank, finding.phase) == ("", "backward")

    named = replace(of_two, nonfinite_gradient_ranks=(1,))
    finding = findings_of([*calm(60), named])["nonfinite_backward"]
    assert (finding.step, finding.rank, finding.phase) == (61, "1", "backward")
    assert any("those of rank 1 were NaN or Inf" in each.text for each in finding.arguments_for)


def test_a_rank_that_was_measured_only_later_in_the_incident_is_named_with_that_step():
    lost = merged_step(61, nan_elements=4.0, loss_nonfinite=0.0)
    of_two = replace(lost, world_size=2, present_ranks=frozenset({0, 1}))
    later = replace(of_two, sequence=62, step=62, nonfinite_gradient_ranks=(1,))
    finding = findings_of([*calm(60), of_two, later])["nonfinite_backward"]
    assert (finding.step, finding.rank) == (61, "1")
    reported = [each.text for each in finding.arguments_for if "own gradients" in each.text]
    assert len(reported) == 1
    assert "on step 62, where they were first measured, those of rank 1 were NaN" in reported[0]


def test_a_collapse_with_a_finite_loss_names_the_layer_that_overflows():
    steps = calm(550, loss_scale=65536.0)
    steps += [overflow(551 + n, 2.0 ** (16 - n)) for n in range(20)]
    table = layers(551, {"first": {"inf_elements": 1.0}, "last": {"inf_elements": 2.0}, "top": {}})
    finding = findings_of(steps, [table])["loss_scale_collapse"]
    assert (finding.step, finding.layer, finding.phase) == (551, "last", "backward")
    assert finding.likelihood == "likely"


def test_a_scale_that_halves_five_times_after_calibration_is_falling():
    steps = calm(550, loss_scale=65536.0)
    for n in range(5):
        steps.append(overflow(551 + 10 * n, 2.0 ** (16 - n)))
        steps += calm(9, first=552 + 10 * n, loss_scale=2.0 ** (15 - n))
    finding = findings_of(steps)["loss_scale_falling"]
    assert finding.step == 551


def test_a_sawtooth_scale_is_no_collapse():
    steps = calm(510, loss_scale=128.0)
    for n in range(6):
        first = 511 + 60 * n
        steps.append(overflow(first, 128.0))
        steps += calm(30, first=first + 1, loss_scale=64.0)
        steps += calm(29, first=first + 31, loss_scale=128.0)
    found = findings_of(steps)
    assert "loss_scale_collapse" not in found


def test_vanishing_gradients_are_dated_back_to_where_they_fell():
    steps = [*calm(60), *calm(130, first=61, norm=1e-7)]
    finding = findings_of(steps)["gradient_vanishing"]
    assert (finding.step, finding.likelihood) == (61, "likely")


def test_a_converging_run_is_accused_of_nothing():
    steps = [merged_step(n, norm=5e-3, loss=100.0 * 0.9**n) for n in range(1, 150)]
    assert findings_of(steps) == {}


def test_layers_that_lose_their_gradients_are_found_and_frozen_ones_are_not():
    def table(sequence: int, zeros: float):
        alive = {"elements": 100.0, "zero_elements": zeros, "abs_max": 0.1, "sum_squares": 1.0}
        frozen = {"elements": 100.0, "zero_elements": 100.0}
        return layers(sequence, {"alive": alive, "frozen": frozen})

    early = [table(sequence, 5.0) for sequence in range(1, 6)]
    assert findings_of(calm(60), [*early, table(30, 10.0)]) == {}
    steps = calm(60, loss_scale=1024.0)
    finding = findings_of(steps, [*early, table(30, 60.0)])["gradient_underflow"]
    assert (finding.step, finding.layer) == (30, "alive")


def test_a_loss_that_leaves_its_baseline_for_good_is_found():
    risen = [merged_step(n, norm=1.0, loss=7.0) for n in range(81, 111)]
    finding = findings_of([*calm(80), *risen])["loss_diverging"]
    assert finding.step == 81


def test_a_single_loss_spike_is_no_divergence():
    steps = calm(100)
    steps[90] = merged_step(91, norm=1.0, loss=30.0)
    assert findings_of(steps) == {}


def test_ranks_that_wait_are_not_blamed_and_the_one_behind_is():
    now_ns = 10_000 * 10**9
    waiting = {"started_sequence": 60, "phase_unix_ns": now_ns}
    ranks = [
        make_log(
            rank,
            end=EndReason.RUNNING,
            phase=Phase.FORWARD if rank == 2 else Phase.BACKWARD,
            state=waiting,
            world_size=3,
        )
        for rank in range(3)
    ]
    steps = calm(60, step_seconds=0.1)
    finding = findings_of(steps, ranks=ranks, read_unix_seconds=10_300.0)["rank_stalled"]
    assert (finding.rank, finding.phase, finding.likelihood) == ("2", "forward", "likely")
    assert findings_of(steps, ranks=ranks, read_unix_seconds=10_010.0) == {}


@pytest.mark.parametrize("phase", [Phase.EVAL, Phase.CHECKPOINT])
def test_an_evaluation_is_no_stall(phase):
    ranks = [make_log(0, end=EndReason.RUNNING, phase=phase, state={"phase_unix_ns": 0})]
    assert findings_of(calm(60), ranks=ranks, read_unix_seconds=9e9) == {}


def test_a_lone_killed_process_is_distinguished_from_an_error():
    killed = make_log(0, end=EndReason.KILLED, phase=Phase.BACKWARD, state={"started_sequence": 61})
    assert list(findings_of(calm(60), ranks=[killed])) == ["rank_killed"]
    failed = make_log(0, end=EndReason.FAILED)
    assert list(findings_of(calm(60), ranks=[failed])) == ["rank_failed"]


def test_ranks_that_fail_because_another_was_killed_are_a_consequence():
    ranks = [
        make_log(0, end=EndReason.FAILED, world_size=2, state={"started_sequence": 61}),
        make_log(
            1,
            end=EndReason.KILLED,
            phase=Phase.FORWARD,
            world_size=2,
            state={"started_sequence": 61},
        ),
    ]
    found = findings_of(calm(60), ranks=ranks)
    assert found["rank_killed"].rank == "1"
    assert found["rank_failed"].follows == "rank_killed"


def test_a_run_without_a_single_step_has_no_story():
    assert findings_of([]) == {}


def at_rate(steps, rate):
    return [
        merged_step(step.sequence, **{**step.columns, **step.gradients, "learning_rate": rate})
        for step in steps
    ]


def test_a_learning_rate_that_jumped_is_the_cause_and_the_explosion_follows_from_it():
    before = at_rate(calm(160), 0.001)
    after = at_rate(
        [merged_step(n, norm=4000.0, loss=300.0, sum_squares=4000.0**2) for n in range(161, 200)],
        3.0,
    )
    found = findings_of([*before, *after])
    jump = found["learning_rate_jump"]
    assert (jump.step, jump.likelihood) == (161, "likely")
    assert jump.arguments_for[0].text == ("The learning rate rose from 0.001 to 3, 3e+03-fold.")
    assert found["gradient_explosion"].follows == "learning_rate_jump"
    assert found["loss_diverging"].follows == "learning_rate_jump"


def test_a_warm_up_and_a_warm_restart_are_no_jump():
    warm_up = [*at_rate(calm(50), 1e-7), *at_rate(calm(60, first=51), 1e-3)]
    restart = [
        *at_rate(calm(60, first=111), 1e-6),
        *at_rate(calm(60, first=171), 1e-3),
    ]
    assert findings_of([*warm_up, *restart]) == {}


def test_norms_that_are_large_by_nature_are_accused_of_nothing():
    assert findings_of(calm(200, norm=4e4)) == {}


def test_an_active_condition_is_a_cause_where_the_record_is_too_short_to_show_it():
    growth = make_condition(name="MpAgentAttentionLogitGrowth", severity="warning", since_step=7)
    found = findings_of(calm(60), conditions=[growth])
    assert list(found) == ["attention_logit_growth"]
    finding = found["attention_logit_growth"]
    assert (finding.step, finding.likelihood) == (7, "possible")
    assert finding.cause.title == "Attention logits are growing"
    assert remedies_for(finding.cause)


def test_a_severity_of_another_release_is_left_out():
    unknown = make_condition(name="MpAgentAttentionLogitGrowth", severity="fatal")
    assert findings_of(calm(60), conditions=[unknown]) == {}


def test_a_condition_that_the_record_shows_is_not_reported_twice():
    active = make_condition(name="MpAgentGradientExplosion", severity="critical", since_step=1)
    found = findings_of([*calm(60), *growing(61, 8)], conditions=[active])
    assert (next(iter(found)), found["gradient_explosion"].step) == ("gradient_explosion", 63)


def test_an_explosion_that_the_guard_kept_from_the_weights_is_said_to_be_contained():
    steps = calm(100)
    for place in (80, 81):
        steps[place] = merged_step(place + 1, norm=5000.0, loss=2.0, guard_skip_update=1.0)
    assert findings_of(steps).keys() == {"contained_explosion"}
    for place in (80, 81):
        steps[place] = merged_step(place + 1, norm=5000.0, loss=2.0)
    assert next(iter(findings_of(steps))) == "gradient_explosion"


@pytest.mark.parametrize("step_seconds", [0.01, 1.0, 60.0])
def test_what_alerts_wait_steps_for_is_found_however_long_the_steps_took(step_seconds):
    steps = [
        replace(step, time_unix_seconds=step.sequence * step_seconds)
        for step in (*calm(60), *calm(130, first=61, norm=1e-7))
    ]
    assert findings_of(steps)["gradient_vanishing"].step == 61


def test_nan_of_an_epsilon_that_is_zero_is_not_blamed_on_the_forward_pass():
    steps = [
        merged_step(1, norm=1.0, loss=2.0),
        *(merged_step(n, loss_nonfinite=1.0) for n in (2, 3)),
    ]
    found = findings_of(steps, zero_epsilon_optimizer="AdamW", zero_epsilon="1e-08")
    assert next(iter(found)) == "zero_epsilon"
    finding = found["zero_epsilon"]
    assert (finding.likelihood, finding.phase) == ("likely", "optimizer")
    assert "AdamW keeps its state in FP16" in finding.arguments_for[0].text
    assert found["nonfinite_forward"].follows == "zero_epsilon"


def test_nan_with_an_epsilon_that_the_state_holds_is_not_blamed_on_the_optimizer():
    steps = [
        merged_step(1, norm=1.0, loss=2.0),
        *(merged_step(n, loss_nonfinite=1.0) for n in (2, 3)),
    ]
    assert "zero_epsilon" not in findings_of(steps)
