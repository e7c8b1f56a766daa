from dataclasses import replace

from mp_agent.node.accounting.incidents import HEALTHY_STEPS, IncidentTracker
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import FirstNonfinite
from tests.agent.node.builders import merged_step


def of_four(step: MergedStep, *loss_ranks: int) -> MergedStep:
    return replace(
        step, world_size=4, present_ranks=frozenset(range(4)), nonfinite_loss_ranks=loss_ranks
    )


def test_one_ranks_own_loss_names_the_rank():
    tracker = IncidentTracker()
    tracker.fold(of_four(merged_step(7, loss_nonfinite=1.0, nan_elements=3.0), 2))

    assert tracker.first == FirstNonfinite(step=7, rank="2", layer="", phase="forward")


def test_a_value_born_in_backward_names_no_rank_but_its_layer():
    tracker = IncidentTracker()
    tracker.fold(of_four(merged_step(7, loss_nonfinite=0.0, nan_elements=3.0)))
    tracker.set_layer(7, "head.weight")

    assert tracker.first == FirstNonfinite(step=7, rank="", layer="head.weight", phase="backward")


def test_a_value_born_in_the_backward_of_one_rank_names_it():
    tracker = IncidentTracker()
    step = of_four(merged_step(7, loss_nonfinite=0.0, nan_elements=3.0))
    tracker.fold(replace(step, nonfinite_gradient_ranks=(2,)))
    tracker.set_layer(7, "head.weight")

    expected = FirstNonfinite(step=7, rank="2", layer="head.weight", phase="backward")
    assert tracker.first == expected


def test_a_rank_that_keeps_making_nan_is_named_once_its_own_gradients_are_measured():
    tracker = IncidentTracker()
    for sequence in (7, 8, 9):
        step = of_four(merged_step(sequence, loss_nonfinite=0.0, nan_elements=3.0))
        tracker.fold(replace(step, nonfinite_gradient_ranks=(2,) if sequence == 9 else ()))

    assert tracker.first == FirstNonfinite(step=7, rank="2", layer="", phase="backward")


def test_what_the_first_step_shows_of_the_ranks_is_not_replaced_by_a_later_one():
    for shown, named in (((0, 1, 2, 3), ""), ((1,), "1")):
        tracker = IncidentTracker()
        for sequence, ranks in ((7, shown), (8, (2,))):
            step = of_four(merged_step(sequence, loss_nonfinite=0.0, nan_elements=3.0))
            tracker.fold(replace(step, nonfinite_gradient_ranks=ranks))

        assert tracker.first is not None
        assert tracker.first.rank == named


def test_gradients_of_a_later_step_whose_loss_is_not_finite_name_no_rank():
    tracker = IncidentTracker()
    tracker.fold(of_four(merged_step(7, loss_nonfinite=0.0, nan_elements=3.0)))
    later = of_four(merged_step(8, loss_nonfinite=1.0, nan_elements=3.0), 2)
    tracker.fold(replace(later, nonfinite_gradient_ranks=(2,)))

    assert tracker.first == FirstNonfinite(step=7, rank="", layer="", phase="backward")


def test_gradients_of_all_ranks_at_once_name_none():
    tracker = IncidentTracker()
    step = of_four(merged_step(7, loss_nonfinite=0.0, nan_elements=3.0))
    tracker.fold(replace(step, nonfinite_gradient_ranks=(0, 1, 2, 3)))

    assert tracker.first is not None
    assert tracker.first.rank == ""


def test_a_loss_that_is_not_finite_is_the_earlier_evidence():
    tracker = IncidentTracker()
    step = of_four(merged_step(7, loss_nonfinite=1.0, nan_elements=3.0), 1)
    tracker.fold(replace(step, nonfinite_gradient_ranks=(1, 3)))

    assert tracker.first == FirstNonfinite(step=7, rank="1", layer="", phase="forward")


def test_an_overflow_of_one_rank_that_the_scaler_skips_is_no_incident():
    tracker = IncidentTracker()
    step = of_four(merged_step(7, skipped=1.0, inf_elements=3.0))
    tracker.fold(replace(step, nonfinite_gradient_ranks=(2,)))

    assert tracker.first is None


def test_losses_of_all_ranks_at_once_name_none():
    tracker = IncidentTracker()
    tracker.fold(of_four(merged_step(7, loss_nonfinite=1.0), 0, 1, 2, 3))

    assert tracker.first is not None
    assert tracker.first.rank == ""


def test_a_lone_rank_is_named():
    tracker = IncidentTracker()
    tracker.fold(merged_step(7, loss_nonfinite=1.0))

    assert tracker.first is not None
    assert tracker.first.rank == "0"


def test_after_a_nonfinite_loss_no_layer_is_blamed():
    tracker = IncidentTracker()
    tracker.fold(merged_step(7, loss_nonfinite=1.0, nan_elements=3.0))
    tracker.set_layer(7, "head.weight")

    assert tracker.first is not None
    assert tracker.first.layer == ""


def test_overflows_that_the_scaler_skips_are_no_incident():
    tracker = IncidentTracker()
    for sequence in range(1, 30):
        tracker.fold(merged_step(sequence, skipped=1.0, inf_elements=9.0))

    assert tracker.first is None


def test_a_loss_that_stays_nonfinite_over_skipped_steps_began_with_the_first_of_them():
    tracker = IncidentTracker()
    tracker.fold(merged_step(4, skipped=1.0, loss_nonfinite=1.0))
    tracker.fold(merged_step(5, skipped=1.0, loss_nonfinite=1.0))
    assert tracker.first is None

    tracker.fold(merged_step(6, skipped=1.0, loss_nonfinite=1.0))
    assert tracker.first is not None
    assert tracker.first.step == 4


def test_single_overflowed_forward_passes_far_apart_are_no_incident():
    tracker = IncidentTracker()
    for sequence in range(1, 30):
        bad = float(sequence % 3 == 0)
        tracker.fold(merged_step(sequence, skipped=bad, loss_nonfinite=bad))

    assert tracker.first is None


def test_a_skipped_step_whose_loss_was_finite_ends_the_row():
    tracker = IncidentTracker()
    for sequence in range(1, 30):
        bad = float(sequence % 2)
        tracker.fold(merged_step(sequence, skipped=1.0, loss_nonfinite=bad))

    assert tracker.first is None


def test_what_follows_in_an_incident_does_not_move_its_beginning():
    tracker = IncidentTracker()
    for sequence in (7, 8, 20):
        tracker.fold(merged_step(sequence, nan_elements=1.0))

    assert tracker.first is not None
    assert tracker.first.step == 7


def test_after_a_healthy_while_the_next_value_begins_a_new_incident():
    tracker = IncidentTracker()
    tracker.fold(merged_step(7, nan_elements=1.0))
    for sequence in range(8, 8 + HEALTHY_STEPS):
        tracker.fold(merged_step(sequence))
    tracker.fold(merged_step(500, nan_elements=1.0))

    assert tracker.first is not None
    assert tracker.first.step == 500


def test_a_nan_that_the_script_replaces_before_the_update_is_an_incident_of_its_rank():
    tracker = IncidentTracker()
    tracker.fold(of_four(merged_step(6, loss_nonfinite=0.0, nan_elements=0.0)))
    for sequence in (7, 8):
        step = of_four(merged_step(sequence, loss_nonfinite=0.0, nan_elements=0.0))
        tracker.fold(replace(step, nonfinite_gradient_ranks=(2,)))

    assert tracker.first == FirstNonfinite(step=7, rank="2", layer="", phase="backward")


def test_so_is_one_that_a_few_elements_have_shown_without_its_rank():
    tracker = IncidentTracker()
    tracker.fold(of_four(merged_step(7, nan_elements=0.0, gradients_replaced=1.0)))

    assert tracker.first == FirstNonfinite(step=7, rank="", layer="", phase="backward")


def test_own_gradients_of_a_step_that_was_skipped_are_none():
    tracker = IncidentTracker()
    step = of_four(merged_step(7, skipped=1.0, nan_elements=0.0))
    tracker.fold(replace(step, nonfinite_gradient_ranks=(2,)))

    assert tracker.first is None
