"""What was planted in real jobs is found at its step, rank, layer and phase, and nothing else."""

import pytest

from mp_agent.records.steps import EndReason

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

CAUSES = {
    "clean": (),
    "calibrating": (),
    "explosion": ("gradient_explosion",),
    "overflow-storm": ("loss_scale_collapse", "nonfinite_forward"),
    "nan-on-one-rank": ("nonfinite_forward_one_rank",),
    "nan-in-backward": ("nonfinite_backward",),
    "never-reduced": ("gradients_not_reduced",),
    "optimizer-of-a-copy": ("optimizer_without_gradients",),
    "nan-of-one-rank-that-a-scaler-skips": ("nonfinite_backward_one_rank",),
    "one-rank-off": ("one_rank_off",),
    "killed": ("rank_killed",),
}
"""What may be accused, in this order; along with its consequences."""


@pytest.mark.parametrize("kind", CAUSES)
def test_no_more_is_accused_than_what_was_planted(kind, analysis_of):
    findings = analysis_of(kind).findings
    assert tuple(f.cause.name for f in findings if not f.follows) == CAUSES[kind]
    assert all(f.likelihood == "likely" for f in findings if not f.follows)
    assert {f.follows for f in findings if f.follows} <= set(CAUSES[kind])


def test_an_explosion_begins_where_the_job_itself_saw_it(analysis_of, outcomes):
    facts, analysis = outcomes["explosion"].facts, analysis_of("explosion")
    first = analysis.first_bad
    expected = (facts["step"], "", facts["layer"], "backward")
    assert (first.step, first.rank, first.layer, first.phase) == expected
    at = next(step for step in analysis.history.steps if step.step == facts["step"])
    assert at.grad_norm == pytest.approx(facts["norm"], rel=1e-6)


def test_an_overflow_storm_begins_at_its_first_skipped_step(analysis_of, outcomes):
    analysis = analysis_of("overflow-storm")
    first = analysis.first_bad
    assert (first.step, first.rank, first.layer, first.phase) == (50, "", "", "forward")
    assert "10 step(s)" in first.arguments_for[0].text
    # The scale that the job ended with is half of the last one in force.
    last = analysis.history.steps[-1]
    assert last.get("loss_scale") == 2 * outcomes["overflow-storm"].facts["scale"]


def test_a_nan_in_one_ranks_data_names_that_rank_alone(analysis_of, outcomes):
    first = analysis_of("nan-on-one-rank").first_bad
    step = outcomes["nan-on-one-rank"].facts["step"]
    assert (first.step, first.rank, first.layer, first.phase) == (step, "1", "", "forward")


def test_a_nan_born_in_backward_names_the_layer_and_no_rank(analysis_of, outcomes):
    facts, first = outcomes["nan-in-backward"].facts, analysis_of("nan-in-backward").first_bad
    expected = (facts["step"], "", facts["layer"], "backward")
    assert (first.step, first.rank, first.layer, first.phase) == expected


@pytest.mark.parametrize("kind", ["nan-of-one-rank-that-a-scaler-skips", "one-rank-off"])
def test_what_one_rank_did_on_its_own_names_it_and_its_step(kind, analysis_of, outcomes):
    first = analysis_of(kind).first_bad
    assert (first.step, first.rank) == (outcomes[kind].facts["step"], "1")


def test_a_run_that_went_wrong_from_its_first_step_has_nothing_to_go_back_to(analysis_of):
    analysis = analysis_of("never-reduced")
    advised = " ".join(text for one in analysis.remedies for text in one.remedies)
    assert analysis.first_bad.step == 1
    assert "Start again from the initial weights" in advised
    assert not any(word in advised for word in ("hardware", "memory", "GPU"))


def test_a_killed_rank_is_named_with_where_it_stood(analysis_of):
    analysis = analysis_of("killed")
    first = analysis.first_bad
    assert (first.rank, first.step) == ("1", 43)
    # Rank 0 fails in its collective, unless torchrun is faster and ends it.
    ends = [log.end for log in analysis.evidence.ranks]
    assert ends[0] in (EndReason.FAILED, EndReason.KILLED) and ends[1] is EndReason.KILLED


def test_what_moved_before_an_explosion_is_reported(analysis_of):
    moves = {move.name: move for move in analysis_of("explosion").moves}
    norm = moves["grad_norm"]
    assert norm.moved and norm.long_before < norm.just_before < norm.at
    assert not moves["learning_rate"].moved


def test_a_healthy_story_shows_its_last_steps(analysis_of):
    analysis = analysis_of("clean")
    assert analysis.first_bad is None and analysis.end is EndReason.COMPLETED
    assert [step.step for step in analysis.around] == list(range(108, 121))
