"""Two ranks change their loss scales alike."""

import pytest
import torch

from tests.agent.probe.fully_shard import strategies
from tests.agent.probe.guard import scaled_job
from tests.agent.probe.guard.scaled_job import CALM, COLLAPSE
from tests.agent.probe.ranks import run_ranks

RANKS = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("scaled")
    run_ranks(scaled_job.run, RANKS, path, ranks=RANKS)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", strategies(scaled_job.RUNS))
def test_scales_and_weights_are_equal_on_all_ranks(directory, name):
    scales, weights = scaled_job.course_of(directory, name, 0)
    assert scales[COLLAPSE[-1]] == 2.0**4
    for rank in range(1, RANKS):
        others, other_weights = scaled_job.course_of(directory, name, rank)
        assert others == scales
        assert torch.equal(other_weights, weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", strategies(["ddp", "fsdp2", "one_rank"]))
def test_the_scale_is_set_back_on_the_same_step(directory, name):
    scales, _ = scaled_job.course_of(directory, name, 0)
    reset = COLLAPSE[-1] + CALM
    assert scales[reset - 1 : reset + 1] == [2.0**4, 2.0**16]
    assert scales[-1] == 2.0**16


@pytest.mark.slow
def test_a_dry_run_leaves_the_scale(directory):
    scales, _ = scaled_job.course_of(directory, "dry_run", 0)
    assert set(scales[COLLAPSE[-1] :]) == {2.0**4}
