"""What the ranks merge by themselves is what the node agents merge, to the bit."""

import pickle
from pathlib import Path

import pytest

from mp_agent.node.merge.node_steps import RankStep
from mp_agent.node.merge.run_steps import completed
from mp_agent.records.global_statistics import GlobalStatistics
from mp_agent.records.reduction import reduced_statistics
from tests.agent.node.nodes import merge_nodes
from tests.agent.probe import job
from tests.agent.probe.fully_shard import strategies
from tests.agent.probe.ranks import run_ranks
from tests.agent.probe.rings import merge_rings, read_ring

RANKS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reduced")
    run_ranks(job.run, RANKS, directory, ranks=RANKS)
    return directory


def _found(directory: Path, strategy: str, rank: int) -> dict[int, GlobalStatistics]:
    loaded: dict[int, GlobalStatistics] = pickle.loads(
        job.path_of(directory, strategy, rank).read_bytes()
    )
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("strategy", strategies(job.STRATEGIES))
class TestOnFourRanks:
    def test_the_numbers_are_those_of_the_agents_to_the_bit(self, trained, strategy):
        rings = {rank: read_ring(trained / f"{strategy}{rank}.ring") for rank in range(RANKS)}
        merged = {step.sequence: step for step in merge_rings(rings)}
        found = _found(trained, strategy, 0)
        assert sorted(found) == list(range(1, job.STEPS))
        for sequence, own in found.items():
            step = merged[sequence]
            assert dict(own.gradients) == dict(step.gradients)
            assert dict(own.columns) == dict(step.columns)
            assert own.grad_norm == step.grad_norm
            assert own.complete == step.gradients_complete
            assert (own.present_ranks, own.step) == (RANKS, step.step)

    def test_rank_0s_records_complete_the_steps_of_its_node_to_the_bit(self, trained, strategy):
        """As the root agent has them that no other node reaches: only ranks 0 and 1 are there."""
        rings = {rank: read_ring(trained / f"{strategy}{rank}.ring") for rank in range(RANKS)}
        merged = {step.sequence: step for step in merge_rings(rings)}
        found = {
            reduced.sequence: reduced
            for index in range(len(rings[0].records))
            if (reduced := reduced_statistics(rings[0].values(index))) is not None
        }
        assert len(found) >= job.STEPS - 3
        for sequence, reduced in found.items():
            here = [
                RankStep(rank, rings[rank].schema, rings[rank].records[sequence - 1])
                for rank in (0, 1)
            ]
            step = completed(merge_nodes([here], RANKS), reduced)
            whole = merged[sequence]
            assert dict(step.columns) == dict(whole.columns)
            assert dict(step.gradients) == dict(whole.gradients)
            assert step.gradients_judged == whole.gradients_judged
            assert (step.present_ranks, step.step) == (whole.present_ranks, whole.step)
        others = (reduced_statistics(rings[1].values(index)) for index in range(job.STEPS))
        assert not any(others)

    def test_every_rank_knows_the_same(self, trained, strategy):
        ranks = [_found(trained, strategy, rank) for rank in range(RANKS)]
        assert all(found == ranks[0] for found in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", strategies(["fsdp2", "hsdp", "tp", "apart"]))
def test_a_nan_in_a_shard_is_counted_on_every_rank(trained, strategy):
    found = _found(trained, strategy, RANKS - 1)
    bad = [sequence for sequence, own in found.items() if own.nonfinite_elements > 0]
    assert bad[0] == job.POISONED + 1


@pytest.mark.slow
def test_a_rank_that_dies_leaves_the_others_to_their_own_collective(tmp_path):
    run_ranks(job.run_until_death, 2, tmp_path, ranks=2)
    assert job.path_of(tmp_path, "dying", 0).read_text().split()[0] == str(job.POISONED)
