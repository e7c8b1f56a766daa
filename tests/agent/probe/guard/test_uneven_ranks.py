"""The guard keeps no rank waiting where the ranks do not act alike of themselves."""

from collections.abc import Callable

import pytest
import torch

from tests.agent.probe.guard import uneven_job
from tests.agent.probe.ranks import run_ranks

RANKS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [uneven_job.run_uneven, uneven_job.run_with_a_failure, uneven_job.run_with_a_checkpoint],
    ids=["inputs", "failure", "checkpoint"],
)
def test_training_ends_with_equal_weights(tmp_path, job: Callable[..., None]):
    run_ranks(job, RANKS, tmp_path, ranks=RANKS)
    one, other = (uneven_job.ended(tmp_path, rank) for rank in range(RANKS))
    assert torch.equal(one, other)
