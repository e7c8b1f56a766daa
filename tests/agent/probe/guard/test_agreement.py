"""Two ranks act alike on what only one of them sees."""

from pathlib import Path

import pytest
import torch

from tests.agent.probe.fully_shard import strategies
from tests.agent.probe.guard import job
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import read_ring

RANKS = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guarded")
    run_ranks(job.run, RANKS, directory, ranks=RANKS)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("strategy", strategies(job.STRATEGIES))
class TestOnTwoRanks:
    def test_no_rank_updates_where_one_has_gradients_that_are_not_finite(self, trained, strategy):
        for rank in range(RANKS):
            weights = job.weights_of(trained, strategy, rank)
            assert torch.equal(weights[job.POISONED], weights[job.POISONED - 1])
            assert not torch.equal(weights[job.POISONED - 1], weights[job.POISONED - 2])
            assert torch.isfinite(weights[-1]).all()

    def test_weights_are_equal_up_to_the_step_that_spoils_one_rank(self, trained, strategy):
        one, other = (job.weights_of(trained, strategy, rank) for rank in range(RANKS))
        pairs = zip(one[: job.SPIKING], other[: job.SPIKING], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)

    def test_every_rank_records_the_same_actions(self, trained, strategy):
        for rank in range(RANKS):
            contents = read_ring(trained / f"{strategy}{rank}.ring")
            values = [contents.values(index) for index in range(job.STEPS)]
            for action, step in (("skip_update", job.POISONED), ("clip_gradients", job.SPIKING)):
                acted = [i for i, found in enumerate(values) if found.get(f"guard_{action}")]
                assert acted == [step]
