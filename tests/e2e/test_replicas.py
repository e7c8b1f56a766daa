"""What ranks hold, copies or parts, is judged tensor by tensor, as users train them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mp_agent.catalog.thresholds import resolve
from mp_agent.node.accounting.progress import Progress
from mp_agent.node.accounting.tracker import AccountContext
from mp_agent.records.merged import MergedStep
from tests.agent.probe.rings import merge_rings, read_ring
from tests.e2e.replicas_job import (
    LONG_STEPS,
    OTHER_RATE_AT_STEP,
    PLAIN_STEPS,
    STEPS,
    UNFROZEN_AT_STEP,
)
from tests.frameworks.torchrun import WORLD, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("replicas")
    torchrun("tests.e2e.replicas_job", str(directory))
    return directory


@pytest.fixture
def merged(trained) -> Callable[[str], list[MergedStep]]:
    def steps_of(name: str) -> list[MergedStep]:
        rings = {
            rank: read_ring(trained / name / f"rank{rank}.ring", one_schema=False)
            for rank in range(WORLD)
        }
        assert all(ring.state.probe_errors == 0 for ring in rings.values())
        return merge_rings(rings)

    return steps_of


@pytest.mark.parametrize(
    "name",
    [
        "gradients_reduced_within_step",
        "inner_steps_of_diloco",
        "local_adam_moves_a_bias_alike_at_first",
        "one_router_is_not_reduced",
        "ddp_ignores_two_norms",
        "a_layer_is_added_after_wrapping",
        "a_layer_is_unfrozen_after_wrapping",
        "the_last_micro_batch_under_no_sync",
        "the_first_micro_batch_under_no_sync",
        "a_second_loss_bypasses_the_wrapper",
        "a_second_loss_through_the_wrapper",
        "the_wrapper_is_bypassed",
        "an_ensemble",
        "an_ensemble_with_a_bias_that_adam_moves_alike_at_first",
        "experts_from_one_seed",
        "one_rank_clips_the_norms",
    ],
)
def test_the_norm_counts_copies_once(merged, trained, name):
    norms = torch.load(trained / name / "norms.pt")
    assert [step.grad_norm for step in merged(name)] == pytest.approx(norms, rel=1e-6)


def compared(steps: list[MergedStep], kind: str) -> dict[int, tuple[str, ...]]:
    """Return the tensors that differ, by the step on which they were compared."""
    return {step.sequence: step.replicas[kind].tensors for step in steps if kind in step.replicas}


def unreduced(steps: list[MergedStep]) -> list[int]:
    """Return the steps on which the account says that no collective reduces the gradients."""
    progress, found = Progress(), []
    context = AccountContext(resolve({}), 60.0, progress)
    for step in steps:
        progress.reduction.observe(step, context)
        if progress.reduction.unreduced:
            found.append(step.sequence)
    return found


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("one_router_is_not_reduced", {"router.weight"}),
        (
            "ddp_ignores_two_norms",
            {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"},
        ),
        ("a_layer_is_added_after_wrapping", {"1.weight", "1.bias"}),
        ("a_layer_is_unfrozen_after_wrapping", {"first.weight", "first.bias"}),
        (
            "one_rank_clips_the_norms",
            {"norm.weight", "norm.bias", "out_norm.weight", "out_norm.bias"},
        ),
    ],
)
def test_copies_that_part_are_named_alone_from_the_first_step_on(merged, name, tensors):
    found = compared(merged(name), "weights")
    assert found.pop(1) == ()
    assert found.keys() >= {2, 4, STEPS}
    assert all(set(own) == tensors for own in found.values())


def test_a_layer_that_ddp_does_not_reduce_is_named_one_step_after_it_is_unfrozen(merged):
    steps = merged("a_layer_is_unfrozen_in_mid_run")
    found = compared(steps, "weights")
    assert found[UNFROZEN_AT_STEP] == ()
    assert found[UNFROZEN_AT_STEP + 1] == ("first.weight", "first.bias")
    assert not unreduced(steps)


def test_a_layer_that_is_unfrozen_and_wrapped_again_stays_equal(merged):
    steps = merged("a_layer_is_unfrozen_and_wrapped_again")
    assert UNFROZEN_AT_STEP + 1 in compared(steps, "weights")
    assert all(found.agree for step in steps for found in step.replicas.values())
    assert not unreduced(steps)


@pytest.mark.parametrize("name", ["under_ddp", "without_a_wrapper"])
def test_a_rank_with_another_rate_is_found_on_the_next_32nd_step(merged, name):
    steps = merged(f"one_rank_has_another_rate_{name}")
    agree = {step.sequence: step.replicas["weights"].agree for step in steps
             if "weights" in step.replicas}  # fmt: skip
    assert agree.pop(128) is False
    assert all(agree.values())
    assert max(agree) == 100
    rates = {step.get("lowest_learning_rate") for step in steps
             if step.sequence >= OTHER_RATE_AT_STEP}  # fmt: skip
    assert rates == {0.025}


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("a_codebook_follows_each_ranks_data", ("codes",)),
        ("a_frozen_parameter_changes_on_one_rank", ("router.weight",)),
    ],
)
def test_frozen_parameters_and_buffers_that_part_are_named_alone(merged, name, tensors):
    steps = merged(name)
    assert compared(steps, "state")[STEPS] == tensors
    assert all(step.replicas["weights"].agree for step in steps if "weights" in step.replicas)


def test_buffers_that_nothing_shows_to_be_copies_are_named_as_such(merged):
    state = merged("a_plain_codebook_follows_each_ranks_data")[-1].replicas["state"]
    assert (state.agree, state.unjudged, state.local) == (True, ("codes",), ())


def test_statistics_of_each_ranks_data_are_no_divergence(merged):
    steps = merged("statistics_of_batch_norm_are_local")
    assert all(found.agree for step in steps for found in step.replicas.values())
    assert steps[-1].replicas["state"].local == ("layers.1.running_mean", "layers.1.running_var")


@pytest.mark.parametrize(
    "name",
    [
        "gradients_reduced_within_step",
        "inner_steps_of_diloco",
        "local_adam_moves_a_bias_alike_at_first",
        "local_sgd_under_ddp",
        "the_first_micro_batch_under_no_sync",
        "a_second_loss_through_the_wrapper",
        "plain_copies_are_averaged",
        "each_rank_updates_its_part_under_ddp",
        "the_first_pass_of_sam_is_local",
        "an_ensemble",
        "an_ensemble_with_a_bias_that_adam_moves_alike_at_first",
        "experts_from_one_seed",
        "statistics_of_batch_norm_are_local",
    ],
)
def test_ranks_that_differ_by_design_are_silent(merged, name):
    steps = merged(name)
    assert all(found.agree for step in steps for found in step.replicas.values())
    assert unreduced(steps) == []


@pytest.mark.parametrize("name", ["the_wrapper_is_bypassed", "a_second_loss_bypasses_the_wrapper"])
def test_a_bypassed_wrapper_is_found_at_the_second_step(merged, name):
    steps = merged(name)
    assert unreduced(steps) == list(range(2, STEPS + 1))
    assert all(found.agree for step in steps for found in step.replicas.values())


def test_updates_that_are_never_reduced_are_found_once_no_averaging_is_expected(merged):
    steps = merged("the_last_micro_batch_under_no_sync")
    limit = int(resolve({})["unreduced_steps"])
    assert unreduced(steps) == list(range(limit, LONG_STEPS + 1))
    assert all(found.agree for step in steps for found in step.replicas.values())


def test_copies_without_a_wrapper_are_found_by_all_steps_measured_or_not(merged):
    steps = merged("plain_copies_train_apart")
    measured = [step.sequence for step in steps if step.get("gradients_measured") == 1.0]
    limit = 8 * int(resolve({})["unreduced_steps"])
    assert len(measured) < limit < PLAIN_STEPS
    assert unreduced(steps)[0] == next(number for number in measured if number >= limit)


def test_copies_that_have_parted_are_no_longer_said_to_be_equal(merged):
    account = Progress()
    for step in merged("plain_copies_train_apart"):
        account.replicas.observe(step, AccountContext(resolve({}), 60.0, account))
    assert "weights" not in account.replicas.views
